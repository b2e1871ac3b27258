"""Checkpoints that are directories, for models too big to gather: each rank writes and reads its own part.

::

    epoch=0-step=10.ckpt/
        __0_0.distcp, __1_0.distcp ...  tensors of each rank, in torch.distributed.checkpoint's format
        .metadata                       what is where in them, for torch.distributed.checkpoint
        trainer.pt                      everything else, loaded with weights_only=True
        manifest.json                   sizes and SHA-256 of all these; written last

Parameters and optimizer states are stored under the names of the whole module's parameters, so any layout can read
them. A new directory is filled under a temporary name and verified before it takes the place of another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from lightning_smddp.checkpoint.contents import bytes_needed, dump_of
from lightning_smddp.checkpoint.directories import existing, new_directory
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.files import explained, put_in_place, require_space, sync_directory
from lightning_smddp.checkpoint.hashing import HashingWriter, hashed_file
from lightning_smddp.checkpoint.manifest import NAME, Manifest
from lightning_smddp.checkpoint.parts import Names, Outline, Parts, Path, put_together, take_apart
from lightning_smddp.checkpoint.places import locate
from lightning_smddp.checkpoint.ranks import Ranks
from lightning_smddp.checkpoint.reading import read_checkpoint
from lightning_smddp.checkpoint.safe_metadata import read_metadata
from lightning_smddp.checkpoint.tensor_files import (
    METADATA,
    Entry,
    map_tensors,
    write_metadata,
    write_tensors,
)

_REST = "trainer.pt"
_VERSION = 1


def save_sharded(
    checkpoint: Mapping[str, Any] | None,
    path: str | os.PathLike[str],
    names: Names = (),
    order: Sequence[str] = (),
    ranks: Ranks | None = None,
    files: int = 1,
) -> None:
    """Save a checkpoint that no rank holds as a whole. Collective over ``ranks``.

    What was at ``path`` stays until the new one is complete and verified. Tensors are copied to the CPU one by one.

    Args:
        checkpoint: this rank's part of it, as :func:`~lightning_smddp.checkpoint.parts.take_apart` needs it; None if it
            has none. Tensors that several ranks have are written by the first of them, and all that is not a tensor
            of the model or its optimizers too.
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
    parts = Parts()

    def offer() -> Any:
        nonlocal parts
        parts = Parts() if checkpoint is None else take_apart(checkpoint, names)
        sizes = [[list(name), tensor.nbytes] for name, tensor in parts.tensors.items()]
        return [sizes, parts.outline.to_json()]

    offers = ranks.gather(offer)
    mine, needed = _share(parts, [sizes for sizes, _ in offers], ranks.rank)
    try:
        with ExitStack() as stack:
            directory = ranks.first(lambda: _begin(stack, final, needed + bytes_needed(_small(parts.rest))))
            written = ranks.gather(lambda: _write(directory, ranks.rank, _divide(mine, files)))
            outlines = [Outline.from_json(told) for _, told in offers]
            ranks.first(lambda: _finish(directory, final, parts.rest, outlines, order, written))
    except OSError as error:
        raise explained(error, str(path), needed) from error


def load_sharded(
    path: str | os.PathLike[str],
    ranks: Ranks | None = None,
    weights_only: bool | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Load what :func:`save_sharded` saved, on any number of ranks. Collective over ``ranks``.

    Its tensors are the files themselves, mapped into memory: what a rank does not use is never read, and what it
    keeps it should copy (:func:`~lightning_smddp.wire.pytree.copied`).

    Args:
        path: a local path.
        ranks: each verifies a share of the files; None for this process alone.
        weights_only: for what is not a tensor, as of :func:`read_checkpoint`.
        verify: compare the files' hashes, which reads all of them once, on all ranks together. Not needed for one that
            :meth:`ShardedDirectories.verify` has just passed.

    Raises:
        CheckpointError: on every rank: it is damaged, or has objects that are not plain data.
        FileNotFoundError: there is none.
    """
    ranks = ranks or Ranks()
    directory = existing(local_path(path))
    ranks.gather(lambda: _verify(directory, ranks if verify else None))
    loaded: list[dict[str, Any]] = []
    ranks.gather(lambda: loaded.append(_read(directory, weights_only)))
    return loaded[0]


def _verify(directory: str, ranks: Ranks | None) -> None:
    """Compare the sizes of all files, and the hashes of this rank's share of them."""
    manifest = Manifest.read(directory)
    manifest.check_sizes(directory)
    if ranks is not None:
        by_size = sorted(manifest.files, key=lambda name: -manifest.files[name][0])
        manifest.check_hashes(directory, by_size[ranks.rank :: ranks.size])


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether there is a directory at a local path, such as :func:`save_sharded` makes."""
    fs, name = locate(path)
    return fs is None and os.path.isdir(existing(name))


def has_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether a directory at a local path is one that :func:`save_sharded` has made."""
    return os.path.exists(os.path.join(existing(local_path(path)), NAME))


class ShardedDirectories:
    """What ``newest_checkpoint`` has to know of these directories."""

    def saved_ns(self, path: str) -> int | None:
        """When the one at ``path`` was saved (nanoseconds since 1970); None if that is no such checkpoint."""
        try:
            return Manifest.read(path).saved_ns
        except (CheckpointError, OSError):
            return None

    def verify(self, path: str, ranks: Ranks) -> None:
        """Raise ``CheckpointError`` on every rank if it is not whole. Collective: each verifies some files."""

        def check() -> None:
            _verify(path, ranks)
            read_metadata(path)

        ranks.gather(check)


def local_path(path: str | os.PathLike[str]) -> str:
    """``path``, if it is local. Raises ``ValueError`` for URLs."""
    fs, name = locate(path)
    if fs is not None:
        raise ValueError(
            f"{path} cannot be a sharded checkpoint: its files are mapped into memory, so they have to be on a file "
            "system. Give a path on one that all nodes share, or save with sharded=False."
        )
    return name.rstrip(os.sep)


def _share(parts: Parts, everyones: Sequence[Any], rank: int) -> tuple[dict[Path, Tensor], int]:
    """The tensors that no rank before this one has, and the bytes of all ranks' tensors."""
    sizes: dict[Path, int] = {}
    before: set[Path] = set()
    for number, theirs in enumerate(everyones):
        if number == rank:
            before = set(sizes)
        for name, size in theirs:
            sizes.setdefault(tuple(name), size)
    return {name: tensor for name, tensor in parts.tensors.items() if name not in before}, sum(sizes.values())


def _small(rest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rest.items() if key != "state_dict"}


def _begin(stack: ExitStack, final: str, needed: int) -> str:
    directory = stack.enter_context(new_directory(final))
    require_space(directory, needed)
    return directory


def _divide(tensors: Mapping[Path, Tensor], files: int) -> list[dict[Path, Tensor]]:
    """Into pieces of about equal size, in order."""
    total, before = sum(tensor.nbytes for tensor in tensors.values()), 0
    pieces: list[dict[Path, Tensor]] = [{} for _ in range(files)]
    for name, tensor in tensors.items():
        pieces[min(files - 1, before * files // max(1, total))][name] = tensor
        before += tensor.nbytes
    return [piece for piece in pieces if piece]


def _write(directory: str, rank: int, pieces: Sequence[Mapping[Path, Tensor]]) -> list[Any]:
    """JSON for each file: its name, its bytes, its hash, its entries."""
    written: list[Any] = []
    for index, tensors in enumerate(pieces):
        name = f"__{rank}_{index}.distcp"  # as torch.distributed.checkpoint calls them
        file, entries = write_tensors(directory, name, tensors)
        written.append([name, file.size, file.digest, [entry.to_json() for entry in entries]])
    return written


def _finish(
    directory: str,
    final: str,
    rest: Mapping[str, Any],
    outlines: Sequence[Outline],
    order: Sequence[str],
    written: Sequence[Any],
) -> None:
    """The first rank's work when all tensors are written."""
    whole = Outline()
    for outline in outlines:
        whole.add(outline)
    whole.sort(order, rest)
    told = [file for theirs in written for file in theirs]
    entries = [Entry.from_json(entry) for *_, theirs in told for entry in theirs]
    files = {name: (size, digest) for name, size, digest, _ in told}
    contents = {"version": _VERSION, "outline": whole.to_json(), "checkpoint": dict(rest)}
    small = {METADATA: write_metadata(directory, entries), _REST: _write_rest(directory, contents)}
    files.update({name: (file.size, file.digest) for name, file in small.items()})
    Manifest(time.time_ns(), files).write(directory)
    sync_directory(directory)
    put_in_place(directory, final)


def _write_rest(directory: str, contents: Mapping[str, Any]) -> HashingWriter:
    with hashed_file(os.path.join(directory, _REST)) as file:
        dump_of(contents)(file)
    return file


def _read(directory: str, weights_only: bool | None) -> dict[str, Any]:
    tensors = map_tensors(directory, read_metadata(directory))
    path = os.path.join(directory, _REST)
    contents = read_checkpoint(path, "cpu", weights_only)
    try:
        return put_together(contents["checkpoint"], Outline.from_json(contents["outline"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"does not fit {METADATA} and {NAME}: {type(error).__name__}: {error}"
        raise CheckpointError(path, reason, "Use an earlier checkpoint, or another copy of this one.") from error
