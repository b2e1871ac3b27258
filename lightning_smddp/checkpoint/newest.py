"""The newest checkpoint that is whole, among all that a run has left."""

from __future__ import annotations

import logging
import os
import posixpath
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Protocol

from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.places import locate, modified_ns
from lightning_smddp.checkpoint.ranks import Ranks
from lightning_smddp.checkpoint.reading import verify_checkpoint
from lightning_smddp.checkpoint.zip_files import TAIL_BYTES, saved_ns

_log = logging.getLogger(__name__)
SUFFIX = ".ckpt"


class DirectoryFormat(Protocol):
    """Checkpoints that are directories."""

    def saved_ns(self, path: str) -> int | None:
        """When the one at ``path`` was saved (nanoseconds since 1970); None if that is no such checkpoint."""

    def verify(self, path: str, ranks: Ranks) -> None:
        """Raise ``CheckpointError`` on every rank if it is not whole. Collective."""


@dataclass(frozen=True, order=True)
class _Candidate:
    saved_ns: int
    path: str
    is_directory: bool = False


def newest_checkpoint(
    places: Iterable[str | PathLike[str]],
    directories: DirectoryFormat | None = None,
    report: Callable[[str], None] = _log.warning,
    ranks: Ranks | None = None,
) -> str | None:
    """The valid checkpoint that was saved last, or None. Collective over ``ranks``, with the same result on each.

    Which one is newer is read from the files of ours themselves, as their times of change do not survive copying
    (SageMaker restores a run's directory from S3); of others the time of change counts.

    The first rank looks what there is. Then all verify it together, as one that waits for another for as long as it
    takes to read a large checkpoint would give it up: each reads local files, and a share of a directory.

    Args:
        places: directories and URLs whose ``*.ckpt`` are looked at, and such files themselves; the first rank's count.
            Those that do not exist are passed over.
        directories: knows checkpoints that are directories; None leaves them out.
        report: is called on the first rank with a line for each newer one that is not valid.
        ranks: None for this process alone.

    Raises:
        CheckpointError: on every rank: one that the first rank can read cannot be read by another.
    """
    ranks = ranks or Ranks()
    newest_first = partial(_newest_first, places, directories)
    for path, is_directory in ranks.first(newest_first):
        _require_readable(path, ranks)
        try:
            if is_directory:
                assert directories is not None
                directories.verify(path, ranks)
            elif "://" in path:
                ranks.first(partial(verify_checkpoint, path))
            else:
                ranks.gather(partial(verify_checkpoint, path))
        except (CheckpointError, OSError) as error:
            if ranks.rank == 0:
                report(f"Skipped a newer checkpoint that cannot be used: {error}")
        else:
            return str(path)
    return None


def _newest_first(places: Iterable[str | PathLike[str]], directories: DirectoryFormat | None) -> list[Any]:
    """Paths, and whether they are directories."""
    candidates = sorted(set(_candidates(places, directories)), reverse=True)
    return [[candidate.path, candidate.is_directory] for candidate in candidates]


def _require_readable(path: str, ranks: Ranks) -> None:
    """Raise on every rank if the first can read ``path`` and another cannot. Collective."""
    if "://" in path:
        return
    first, *others = ranks.gather(lambda: None if os.access(path, os.R_OK) else socket.gethostname())
    blind = [f"rank {rank} on {host}" for rank, host in enumerate(others, 1) if host is not None]
    if first is None and blind:
        raise CheckpointError(
            path,
            f"rank 0 has chosen it, but {', '.join(blind)} cannot read it",
            "Write checkpoints to a directory that all nodes share, or to a URL.",
        )


def _candidates(places: Iterable[str | PathLike[str]], directories: DirectoryFormat | None) -> Iterator[_Candidate]:
    for place in places:
        fs, name = locate(place)
        yield from _local(name, directories) if fs is None else _remote(fs, name)


def _local(place: str, directories: DirectoryFormat | None) -> Iterator[_Candidate]:
    inside = place.endswith(SUFFIX)
    paths = [place] if inside or not os.path.isdir(place) else [os.path.join(place, n) for n in os.listdir(place)]
    for path in paths:
        if not path.endswith(SUFFIX) or not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            yield _Candidate(_saved_ns(path), path)
        elif directories is not None and (saved_ns := directories.saved_ns(path)) is not None:
            yield _Candidate(saved_ns, path, is_directory=True)


def _saved_ns(path: str) -> int:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - TAIL_BYTES))
            said = saved_ns(file.read())
            return status.st_mtime_ns if said is None else said
    except OSError:  # which will be reported when it is verified
        return 0


def _remote(fs: Any, place: str) -> Iterator[_Candidate]:
    fs.invalidate_cache()
    try:
        names = [place] if place.endswith(SUFFIX) else [e["name"] for e in fs.ls(place, detail=True)]
    except FileNotFoundError:
        return
    for name in names:
        if posixpath.basename(name).endswith(SUFFIX) and fs.isfile(name):
            yield _Candidate(_remote_saved_ns(fs, name), fs.unstrip_protocol(name))


def _remote_saved_ns(fs: Any, name: str) -> int:
    try:
        size = fs.size(name)
        said = saved_ns(fs.cat_file(name, start=max(0, size - TAIL_BYTES), end=size)) if size else None
        return modified_ns(fs, name) if said is None else said
    except OSError:  # which will be reported when it is verified
        return 0
