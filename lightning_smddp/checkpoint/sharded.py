"""Checkpoints that are directories, for models too big to gather: each rank writes and reads its own part.

::

    epoch=0-step=10.ckpt/
        __0_0.distcp, __1_0.distcp ...  tensors of each rank: the format of torch.distributed.checkpoint
        .metadata                       what is where in them
        trainer.pt                      everything else, loaded with weights_only=True

Parameters and optimizer states have the names of the whole module's parameters, so any layout can read them.
``torch.distributed.checkpoint`` overwrites in place, where a kill leaves new tensors under an old ``.metadata``: so a
new directory is filled under a temporary name, and takes the place of another when it is complete.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_smddp.checkpoint import files
from lightning_smddp.checkpoint.files import ANOTHER, AnyPath, CheckpointError
from lightning_smddp.checkpoint.parts import Names, merge, split
from lightning_smddp.checkpoint.stored import METADATA, Directory, Stored
from lightning_smddp.communication.objects import each, first

_REST = "trainer.pt"


def is_sharded(path: AnyPath) -> bool:
    """Whether there is a directory at a local path."""
    fs, name = files.locate(path)
    return fs is None and os.path.isdir(_existing(name))


def is_ours(path: AnyPath) -> bool:
    """Whether a directory at a local path is one that :func:`save` has made."""
    return os.path.exists(os.path.join(_existing(local_path(path)), _REST))


def save(
    checkpoint: Mapping[str, Any] | None,
    path: AnyPath,
    names: Names = (),
    group: dist.ProcessGroup | None = None,
    order: Sequence[str] = (),
) -> None:
    """Save a checkpoint that no rank holds as a whole. Collective.

    Args:
        checkpoint: this rank's part, as :func:`~lightning_smddp.checkpoint.parts.split` needs it; None if it has none.
            What several ranks have the first of them writes; what is not of the model or its optimizers is the first
            rank's.
        path: a local path, which every rank sees. What was there stays until the new one is complete.
        names: of the optimizers' parameters.
        group: None for all ranks, or this process alone if it is in no group.
        order: names in the whole module's ``state_dict``; others come behind.

    Raises:
        OSError: on every rank, with ``path`` as its ``filename``.
        ValueError: on every rank: something has no values yet.
    """
    final = local_path(path)
    new = files.temporary_of(final)
    group = group or dist.group.WORLD
    is_first = group is None or group.rank() == 0
    tensors: dict[str, Any] = {}
    rest: dict[str, Any] = {}

    def prepare() -> Any:
        nonlocal tensors, rest
        if is_first:
            files.remove(new)
            os.makedirs(new)
        if checkpoint is not None:
            tensors, rest = split(checkpoint, names)
        return rest.get("state_dict", {}), [optimizer["state"] for optimizer in rest.get("optimizer_states", ())]

    def finish() -> None:
        _merge_states(rest, told, order)
        files.save(rest, os.path.join(new, _REST))
        verify(new)
        files.put_in_place(new, final)

    try:
        told = each(prepare, group)
        _write_tensors(tensors, new, group)
        first(finish, group)
    except OSError as error:
        raise files.not_saved(error, path) from error
    finally:
        if is_first:
            shutil.rmtree(new, ignore_errors=True)  # what of it has not got its name


def _write_tensors(tensors: dict[str, Any], directory: str, group: dist.ProcessGroup | None) -> None:
    """Write tensors of all ranks, and what is where. Errors are raised on every rank. Collective."""
    # The steps of `dcp.save`. That asks `dist.get_rank`, which is the replica's number while another thread is in a
    # pipeline's step, and takes other ranks for the first one then.
    rank = 0 if group is None else group.rank()
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer = dcp.FileSystemWriter(directory)

    def plan() -> dcp.SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write() -> Any:
        try:
            return writer.write_data(planner.finish_plan(own), planner).wait()
        except RuntimeError as error:  # of torch's writer in C++
            raise OSError(errno.EIO, str(error)) from error

    plans, metadata = planner.create_global_plan(each(plan, group))  # the same on every rank
    own = writer.prepare_global_plan(plans)[rank]
    written = each(write, group)
    first(lambda: writer.finish(metadata, written), group)


def _merge_states(
    rest: dict[str, Any],
    told: Sequence[tuple[Mapping[Any, Any], Sequence[Mapping[Any, Any]]]],
    order: Sequence[str],
) -> None:
    """Add what other ranks know: of a pipeline each has the states of other parameters."""
    if "state_dict" in rest:
        rest["state_dict"] = merge([state_dict for state_dict, _ in told], order)
    for index, optimizer in enumerate(rest.get("optimizer_states", ())):
        numbers = range(sum(len(group["params"]) for group in optimizer["param_groups"]))
        optimizer["state"] = merge([states[index] for _, states in told if index < len(states)], numbers)


def load(path: AnyPath, weights_only: bool | None = None) -> dict[str, Any]:
    """What :func:`save` saved, for any number of ranks: states are :class:`~lightning_smddp.checkpoint.stored.Stored`.

    Args:
        path: a local path.
        weights_only: for what is not a tensor, as of :func:`lightning_smddp.checkpoint.files.load`.

    Raises:
        CheckpointError: it is not complete, or has objects that are not plain data.
        FileNotFoundError: there is none.
    """
    directory = _open(path)
    checkpoint: dict[str, Any] = files.load(os.path.join(directory.path, _REST), "cpu", weights_only)
    if "state_dict" in checkpoint:
        checkpoint["state_dict"] = Stored(directory, checkpoint["state_dict"])
    for optimizer in checkpoint.get("optimizer_states", ()):
        optimizer["state"] = Stored(directory, optimizer["state"])
    return checkpoint


def verify(path: AnyPath) -> None:
    """Raise as :func:`load`. A flipped bit in a tensor is not found."""
    files.verify(os.path.join(_open(path).path, _REST))


def _open(path: AnyPath) -> Directory:
    found = _existing(local_path(path))
    if not os.path.exists(found):
        raise FileNotFoundError(f"Checkpoint not found: {found}")
    for name in (METADATA, _REST):
        if not os.path.exists(os.path.join(found, name)):
            raise CheckpointError(found, f"is not a complete sharded checkpoint: it has no {name}", ANOTHER)
    return Directory(found)


def _existing(path: str) -> str:
    """``path``; or if there is none, but a writer died between two renames, where the previous one is."""
    previous = files.previous_of(path)
    return previous if not os.path.lexists(path) and os.path.isdir(previous) else path


def local_path(path: AnyPath) -> str:
    """Where a directory is. Raises ``ValueError`` for a URL."""
    fs, name = files.locate(path)
    if fs is not None:
        raise ValueError(
            f"{path} cannot be a sharded checkpoint, which needs a file system that all nodes share. Give a path on "
            "one, or save with sharded=False."
        )
    return name.rstrip(os.sep)


# ---- conversion ----


def consolidate(directory: AnyPath, file: AnyPath) -> None:
    """Write a sharded checkpoint as one plain file, which Lightning loads without this package.

    Args:
        directory: a checkpoint that was saved with ``sharded=True``; memory has to hold all of it.
        file: path or URL; what is there is replaced when the new file is complete.

    Raises:
        CheckpointError: the directory is damaged.
        OSError: as the system reports it.
    """
    checkpoint = load(directory)
    if "state_dict" in checkpoint:
        checkpoint["state_dict"] = checkpoint["state_dict"].read(checkpoint["state_dict"])
    for optimizer in checkpoint.get("optimizer_states", ()):
        optimizer["state"] = dict(optimizer["state"])
    files.save(checkpoint, file)
