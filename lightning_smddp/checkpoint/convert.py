"""From a directory to one plain file, and back; tensors go from file to file without being in memory as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_smddp.checkpoint.contents import bytes_needed, dump_of
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.locations import write_checkpoint
from lightning_smddp.checkpoint.reading import read_checkpoint
from lightning_smddp.checkpoint.sharded import load_sharded, local_path, save_sharded


def consolidate(directory: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write a sharded checkpoint as one plain file, which Lightning loads without this package.

    Args:
        directory: a checkpoint that was saved with ``sharded=True``.
        file: path or URL; what is there is replaced when the new file is complete and verified.

    Raises:
        CheckpointError: the directory is damaged.
        OSError: as the system reports it, with the bytes needed.
    """
    checkpoint = load_sharded(directory)
    write_checkpoint(dump_of(checkpoint), file, bytes_needed(checkpoint))


def shard(file: str | os.PathLike[str], directory: str | os.PathLike[str], parts: int = 1) -> None:
    """Write a plain checkpoint of a Trainer as a sharded one. Optimizer states are known by number where no names are.

    Args:
        file: a local path.
        directory: what is there is replaced when the new one is complete and verified.
        parts: files of about equal size for the tensors. A sharded checkpoint can be read by any number of ranks, but
            they share the work of verifying it by files.

    Raises:
        CheckpointError: the file is damaged, or was not saved by a Trainer.
        OSError: as the system reports it, with the bytes needed.
        ValueError: ``parts`` is not positive.
    """
    if parts < 1:
        raise ValueError(f"parts={parts} has to be at least 1.")
    checkpoint = read_checkpoint(local_path(file), mmap=True)
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        raise CheckpointError(file, "was not saved by a Trainer: it has no `state_dict`", "Give another file.")
    names = [_names(state["param_groups"]) for state in checkpoint.get("optimizer_states", [])]
    save_sharded(checkpoint, directory, names, list(checkpoint["state_dict"]), files=parts)


def _names(groups: list[dict[str, Any]]) -> dict[int, str]:
    """Those of parameters that an optimizer was given with their names."""
    names: dict[int, str] = {}
    for group in groups:
        names.update(zip(group["params"], group.get("param_names") or (), strict=False))
    return names
