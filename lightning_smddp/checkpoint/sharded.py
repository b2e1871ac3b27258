"""Checkpoints that are directories, for models too big to gather: each rank writes and reads its own part.

::

    epoch=0-step=10.ckpt/
        __0_0.distcp, __1_0.distcp ...  tensors of each rank, in torch.distributed.checkpoint's format
        .metadata                       what is where in them, for torch.distributed.checkpoint
        trainer.pt                      everything else, loaded with weights_only=True
        manifest.json                   sizes of all these; written last

Parameters and optimizer states are stored under the names of the whole module's parameters, so any layout can read
them. A new directory is filled under a temporary name and verified before it takes the place of another.

Without ``manifest.json`` there is no checkpoint. The other files but one are made of zip files, which have checksums;
``.metadata`` has none, so its SHA-256 is in the manifest. Version 1 had such hashes of all files; those are not looked
at.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from lightning_smddp.checkpoint.contents import bytes_needed, dump_of
from lightning_smddp.checkpoint.errors import ANOTHER, CheckpointError
from lightning_smddp.checkpoint.files import (
    existing,
    explained,
    new_directory,
    new_file,
    put_in_place,
    require_as_written,
    require_space,
    sync_directory,
)
from lightning_smddp.checkpoint.locations import AnyPath, locate, write_checkpoint
from lightning_smddp.checkpoint.parts import CheckpointParts, Names, Outline, merge_checkpoint, split_checkpoint
from lightning_smddp.checkpoint.ranks import Ranks
from lightning_smddp.checkpoint.reading import read_checkpoint, verify_checkpoint
from lightning_smddp.checkpoint.safe_metadata import METADATA, read_metadata
from lightning_smddp.checkpoint.tensor_files import (
    BareTensors,
    TensorWriter,
    describe_tensors,
    load_tensors,
    plan_writing,
    results_from_json,
    results_to_json,
    verify_tensors,
)

MANIFEST = "manifest.json"
_FORMAT = "lightning-smddp sharded checkpoint"
_MANIFEST_VERSION = 2

_REST = "trainer.pt"
_VERSION = 1  # of its contents


@dataclass(frozen=True)
class Manifest:
    """Contents of a directory.

    Attributes:
        saved_ns: when it was saved, in nanoseconds since 1970.
        sizes: name of each file -> bytes.
        metadata_sha256: of ``.metadata``, in hexadecimal.
    """

    saved_ns: int
    sizes: Mapping[str, int]
    metadata_sha256: str

    @classmethod
    def of(cls, directory: str) -> Manifest:
        """Of a directory that is complete but for its manifest."""
        sizes = {}
        for name in sorted(os.listdir(directory)):
            sizes[name] = os.path.getsize(os.path.join(directory, name))
        return cls(time.time_ns(), sizes, _sha256_of_metadata(directory))

    def write(self, directory: str) -> None:
        """Write it, and read it back."""
        files: dict[str, dict[str, int | str]] = {}
        for name, size in self.sizes.items():
            files[name] = {"bytes": size}
        files[METADATA]["sha256"] = self.metadata_sha256  # the one file without checksums of its own
        contents = {
            "format": _FORMAT,
            "version": _MANIFEST_VERSION,
            "saved_ns": self.saved_ns,
            "files": files,
        }
        text = json.dumps(contents, indent=1)
        with new_file(os.path.join(directory, MANIFEST)) as file:
            file.write(text.encode())
        if Manifest.read(directory) != self:
            raise OSError(errno.EIO, "what was read back differs from what was written")

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """That of a directory.

        Raises:
            CheckpointError: it has none, or a damaged one.
            FileNotFoundError: there is no such directory.
        """
        path = os.path.join(directory, MANIFEST)
        if not os.path.exists(directory):
            raise FileNotFoundError(f"Checkpoint not found: {directory}")
        if not os.path.isdir(directory):
            raise CheckpointError(
                directory, "is one plain file, not a sharded checkpoint", "It is consolidated already."
            )
        if not os.path.exists(path):
            raise CheckpointError(directory, "is a directory without a manifest, not a complete checkpoint", ANOTHER)
        try:
            with open(path, "rb") as file:
                told = json.load(file)
            if told["format"] != _FORMAT or told["version"] not in (1, _MANIFEST_VERSION):
                raise ValueError(f"format {told['format']!r}, version {told['version']!r}")
            files = told["files"]
            sizes = {}
            for name, facts in files.items():
                if not name or os.path.basename(name) != name:
                    raise ValueError("files outside of the directory")
                sizes[name] = int(facts["bytes"])
            return cls(
                saved_ns=int(told["saved_ns"]),
                sizes=sizes,
                metadata_sha256=str(files[METADATA]["sha256"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"is damaged: {type(error).__name__}: {error}"
            raise CheckpointError(path, reason, ANOTHER) from error

    def check(self, directory: str) -> None:
        """Raise ``CheckpointError`` if a file is missing or has another size, or ``.metadata`` has changed."""
        for name, expected in self.sizes.items():
            path = os.path.join(directory, name)
            if not os.path.isfile(path):
                raise CheckpointError(path, "is missing. Each rank has to see all files of a directory", ANOTHER)
            size = os.path.getsize(path)
            if size != expected:
                raise CheckpointError(path, f"has {size} bytes, it was saved with {expected}", ANOTHER)
        if _sha256_of_metadata(directory) != self.metadata_sha256:
            path = os.path.join(directory, METADATA)
            raise CheckpointError(path, "its contents changed since it was saved (wrong SHA-256)", ANOTHER)


def _sha256_of_metadata(directory: str) -> str:
    path = os.path.join(directory, METADATA)
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def save_sharded(
    checkpoint: Mapping[str, Any] | None,
    path: AnyPath,
    names: Names = (),
    order: Sequence[str] = (),
    ranks: Ranks | None = None,
    files: int = 1,
) -> None:
    """Save a checkpoint that no rank holds as a whole. Collective over ``ranks``.

    What was at ``path`` stays until the new one is complete and verified. Tensors are copied to the CPU one by one.

    Args:
        checkpoint: this rank's part of it, as :func:`~lightning_smddp.checkpoint.parts.split_checkpoint` needs it; None
            if it has none. Tensors that several ranks have are written by the first of them, and all that is not a
            tensor of the model or its optimizers too.
        path: a local path, which every rank sees.
        names: of the optimizers' parameters.
        order: names in the whole module's ``state_dict``.
        ranks: None for this process alone.
        files: how many of about equal size this rank writes.

    Raises:
        OSError: on every rank, of the kind that the system reported, with ``path`` and the bytes needed.
        ValueError: on every rank: something cannot be saved so.
    """
    ranks = ranks or Ranks()
    final = local_path(path)
    parts = CheckpointParts()

    def describe() -> Any:
        nonlocal parts
        if checkpoint is not None:
            parts = split_checkpoint(checkpoint, names)
        return [describe_tensors(parts.tensors), parts.outline.to_json()]

    # Four steps: all describe their tensors, from which each makes the plan of all; the first makes the directory; all
    # write; the first writes the rest and names the directory. An error of any rank ends the saving on all of them.
    described = ranks.gather(describe)
    plans, metadata = plan_writing([tensors for tensors, _ in described])
    needed = _bytes_of(plans)
    try:
        with ExitStack() as stack:  # on the first rank: whatever fails, the new directory is removed
            directory = ranks.first(lambda: _begin(stack, final, needed + bytes_needed(parts.rest)))
            writer = TensorWriter(directory, ranks.rank, files)

            def write() -> Any:
                results = writer.write_data(plans[ranks.rank], BareTensors(parts.tensors))
                return results_to_json(results.wait())

            written = ranks.gather(write)

            def finish() -> None:
                outlines = [Outline.from_json(told) for _, told in described]
                _finish(writer, metadata, written, _rest_of(outlines, order, parts.rest))
                put_in_place(directory, final)

            ranks.first(finish)
    except OSError as error:
        raise explained(error, str(path), needed) from error


def _bytes_of(plans: Sequence[SavePlan]) -> int:
    total = 0
    for plan in plans:
        for item in plan.items:
            total += item.tensor_storage_size() or 0
    return total


def _begin(stack: ExitStack, final: str, needed: int) -> str:
    directory = stack.enter_context(new_directory(final))
    require_space(directory, needed)
    return directory


def _rest_of(
    outlines: Sequence[Outline],
    order: Sequence[str],
    rest: Mapping[str, Any],
) -> dict[str, Any]:
    """The contents of ``trainer.pt``."""
    outline = Outline.merged(outlines, order, rest)
    return {
        "version": _VERSION,
        "outline": outline.to_json(),
        "checkpoint": dict(rest),
    }


def _finish(
    writer: TensorWriter,
    metadata: Metadata,
    written: Sequence[Any],
    contents: Mapping[str, Any],
) -> None:
    """The first rank's work when all tensors are written: the other files."""
    directory = writer.directory
    results = [results_from_json(told) for told in written]
    writer.finish(metadata, results)
    # What is read back has no version of torch, which is not looked at.
    if read_metadata(directory) != replace(metadata, version=None):
        raise OSError(errno.EIO, f"what was read back of {METADATA} differs from what was written")
    path = os.path.join(directory, _REST)
    with new_file(path) as file:
        dump_of(contents)(file)
    with open(path, "rb") as rest:
        require_as_written(rest)
    Manifest.of(directory).write(directory)
    sync_directory(directory)


def load_sharded(
    path: AnyPath,
    ranks: Ranks | None = None,
    weights_only: bool | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Load what :func:`save_sharded` saved, on any number of ranks. Collective over ``ranks``.

    Its tensors are the files themselves, mapped into memory: what a rank does not use is never read, and what it
    keeps it should copy (:func:`~lightning_smddp.wire.pytree.copied`).

    Args:
        path: a local path.
        ranks: each verifies a share of the tensors; None for this process alone.
        weights_only: for what is not a tensor, as of :func:`read_checkpoint`.
        verify: compare the tensors' checksums, which reads all of them once, on all ranks together. Not needed for one
            that :func:`verify_sharded` has just passed.

    Raises:
        CheckpointError: on every rank: it is damaged, or has objects that are not plain data.
        FileNotFoundError: there is none.
    """
    ranks = ranks or Ranks()
    directory = existing(local_path(path))
    loaded: dict[str, Any] = {}

    def check() -> None:
        Manifest.read(directory).check(directory)
        if verify:
            verify_tensors(directory, ranks.rank, ranks.size)

    def read() -> None:
        loaded.update(_read(directory, weights_only))

    # Nobody reads before each has verified its share, which may be what another one reads.
    ranks.gather(check)
    ranks.gather(read)
    return loaded


def _read(directory: str, weights_only: bool | None) -> dict[str, Any]:
    tensors = load_tensors(directory)
    path = os.path.join(directory, _REST)
    contents = read_checkpoint(path, "cpu", weights_only)
    # Each file is whole by now, but they may be of different checkpoints.
    try:
        outline = Outline.from_json(contents["outline"])
        return merge_checkpoint(contents["checkpoint"], outline, tensors)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"does not fit {METADATA} and {MANIFEST}: {type(error).__name__}: {error}"
        raise CheckpointError(path, reason, ANOTHER) from error


def verify_sharded(path: str, ranks: Ranks) -> None:
    """Raise ``CheckpointError`` on every rank if the checkpoint at a local path is not whole. Collective."""

    def check() -> None:
        Manifest.read(path).check(path)
        verify_tensors(path, ranks.rank, ranks.size)
        if ranks.rank == 0:
            verify_checkpoint(os.path.join(path, _REST))

    ranks.gather(check)


def sharded_saved_ns(path: str) -> int | None:
    """When the directory at a local path was saved (nanoseconds since 1970); None if that is no such checkpoint."""
    try:
        return Manifest.read(path).saved_ns
    except (CheckpointError, OSError):
        return None


def is_sharded(path: AnyPath) -> bool:
    """Whether there is a directory at a local path, such as :func:`save_sharded` makes."""
    fs, name = locate(path)
    return fs is None and os.path.isdir(existing(name))


def has_manifest(path: AnyPath) -> bool:
    """Whether a directory at a local path is one that :func:`save_sharded` has made."""
    directory = existing(local_path(path))
    return os.path.exists(os.path.join(directory, MANIFEST))


def local_path(path: AnyPath) -> str:
    """``path``, if it is local. Raises ``ValueError`` for URLs."""
    fs, name = locate(path)
    if fs is not None:
        raise ValueError(
            f"{path} cannot be a sharded checkpoint: its files are mapped into memory, so they have to be on a file "
            "system. Give a path on one that all nodes share, or save with sharded=False."
        )
    return name.rstrip(os.sep)


def consolidate(directory: AnyPath, file: AnyPath) -> None:
    """Write a sharded checkpoint as one plain file, which Lightning loads without this package.

    Args:
        directory: a checkpoint that was saved with ``sharded=True``.
        file: path or URL; what is there is replaced when the new file is complete and verified.

    Raises:
        CheckpointError: the directory is damaged.
        OSError: as the system reports it, with the bytes needed.
    """
    checkpoint = load_sharded(directory)
    needed = bytes_needed(checkpoint)
    write_checkpoint(dump_of(checkpoint), file, needed)


def shard(file: AnyPath, directory: AnyPath, parts: int = 1) -> None:
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
    states = checkpoint.get("optimizer_states", [])
    names = [_names(state["param_groups"]) for state in states]
    order = list(checkpoint["state_dict"])
    save_sharded(checkpoint, directory, names, order, files=parts)


def _names(groups: list[dict[str, Any]]) -> dict[int, str]:
    """Those of parameters that an optimizer was given with their names."""
    names: dict[int, str] = {}
    for group in groups:
        given = group.get("param_names") or ()
        names.update(zip(group["params"], given, strict=False))  # most groups have no names at all
    return names
