"""The newest checkpoint that is whole, among all that a run has left."""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.places import locate, modified_ns
from lightning_smddp.checkpoint.reading import verify_checkpoint
from lightning_smddp.checkpoint.seal import SEAL_BYTES, BrokenSealError, Seal

_log = logging.getLogger(__name__)
SUFFIX = ".ckpt"


class DirectoryFormat(Protocol):
    """Checkpoints that are directories."""

    def saved_ns(self, path: str) -> int | None:
        """When the one at ``path`` was saved (nanoseconds since 1970); None if that is no such checkpoint."""

    def verify(self, path: str) -> None:
        """Raise ``CheckpointError`` if it is not whole."""


@dataclass(frozen=True, order=True)
class _Candidate:
    saved_ns: int
    path: str
    is_directory: bool = False


def newest_checkpoint(
    places: Iterable[str | PathLike[str]],
    directories: DirectoryFormat | None = None,
    report: Callable[[str], None] = _log.warning,
) -> str | None:
    """The valid checkpoint that was saved last, or None.

    Which one is newer is read from the files of ours themselves, as their times of change do not survive copying
    (SageMaker restores a run's directory from S3); of others the time of change counts.

    Args:
        places: directories and URLs whose ``*.ckpt`` are looked at, and such files themselves. Those that do not
            exist are passed over.
        directories: knows checkpoints that are directories; None leaves them out.
        report: is called with a line for each newer one that is not valid.
    """
    for candidate in sorted(set(_candidates(places, directories)), reverse=True):
        try:
            if candidate.is_directory:
                assert directories is not None
                directories.verify(candidate.path)
            else:
                verify_checkpoint(candidate.path)
        except (CheckpointError, OSError) as error:
            report(f"Skipped a newer checkpoint that cannot be used: {error}")
        else:
            return candidate.path
    return None


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
            seal = _readable(Seal.of, file)
            return os.fstat(file.fileno()).st_mtime_ns if seal is None else seal.saved_ns
    except OSError:  # which will be reported when it is verified
        return 0


def _readable(read: Callable[[Any], Seal | None], source: Any) -> Seal | None:
    try:
        return read(source)
    except BrokenSealError:
        return None


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
        tail = fs.cat_file(name, start=max(0, size - SEAL_BYTES), end=size) if size else b""
        seal = _readable(Seal.parse, tail)
        return modified_ns(fs, name) if seal is None else seal.saved_ns
    except OSError:  # which will be reported when it is verified
        return 0
