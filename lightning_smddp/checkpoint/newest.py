"""The newest checkpoint that is whole, among all that a run has left."""

from __future__ import annotations

import logging
import os
import posixpath
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.locations import AnyPath, locate, modified_ns
from lightning_smddp.checkpoint.ranks import Ranks
from lightning_smddp.checkpoint.reading import verify_checkpoint
from lightning_smddp.checkpoint.sharded import sharded_saved_ns, verify_sharded
from lightning_smddp.checkpoint.zip_files import TAIL_BYTES, saved_ns

_log = logging.getLogger(__name__)
SUFFIX = ".ckpt"


def newest_checkpoint(
    locations: Iterable[AnyPath],
    report: Callable[[str], None] = _log.warning,
    ranks: Ranks | None = None,
) -> str | None:
    """The valid checkpoint that was saved last, or None. Collective over ``ranks``, with the same result on each.

    Which one is newer is read from the files of ours themselves, as their times of change do not survive copying
    (SageMaker restores a run's directory from S3); of others the time of change counts.

    The first rank looks what there is. Then all verify it together, as one that waits for another for as long as it
    takes to read a large checkpoint would give it up: each reads local files, and a share of a sharded one.

    Args:
        locations: directories and URLs whose ``*.ckpt`` are looked at, and such files themselves; the first rank's
            count. Those that do not exist are passed over.
        report: is called on the first rank with a line for each newer one that is not valid.
        ranks: None for this process alone.

    Raises:
        CheckpointError: on every rank: one that the first rank can read cannot be read by another.
    """
    ranks = ranks or Ranks()
    # Each turn is collective: what one rank finds damaged all of them pass over, with the same error.
    for path, is_sharded in ranks.first(lambda: _newest_first(locations)):
        _require_readable(path, ranks)
        try:
            if is_sharded:
                verify_sharded(path, ranks)
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


def _newest_first(locations: Iterable[AnyPath]) -> list[Any]:
    """Paths, and whether they are directories."""
    candidates: set[tuple[int, str, bool]] = set()
    for location in locations:
        fs, name = locate(location)
        if fs is None:
            candidates.update(_local(name))
        else:
            candidates.update(_remote(fs, name))
    newest_first = sorted(candidates, reverse=True)
    return [[path, is_sharded] for _, path, is_sharded in newest_first]


def _require_readable(path: str, ranks: Ranks) -> None:
    """Raise on every rank if the first can read ``path`` and another cannot. Collective."""
    if "://" in path:
        return

    def look() -> list[Any]:
        return [os.access(path, os.R_OK), socket.gethostname()]

    gathered = ranks.gather(look)
    blind = []
    for rank, (reads, host) in enumerate(gathered):
        if not reads:
            blind.append(f"rank {rank} on {host}")
    first_reads, _ = gathered[0]
    if first_reads and blind:
        names = ", ".join(blind)
        raise CheckpointError(
            path,
            f"rank 0 has chosen it, but {names} cannot read it",
            "Write checkpoints to a directory that all nodes share, or to a URL.",
        )


def _local(location: str) -> Iterator[tuple[int, str, bool]]:
    """Time of saving, path, and whether it is a sharded one, of each checkpoint."""
    paths = [location]
    if os.path.isdir(location) and not location.endswith(SUFFIX):
        paths = [os.path.join(location, name) for name in os.listdir(location)]
    for path in paths:
        if not path.endswith(SUFFIX) or not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            yield _saved_ns(path), path, False
            continue
        sharded_ns = sharded_saved_ns(path)
        if sharded_ns is not None:
            yield sharded_ns, path, True


def _saved_ns(path: str) -> int:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - TAIL_BYTES))
            said = saved_ns(file.read())
    except OSError:  # which will be reported when it is verified
        return 0
    if said is None:  # not one of ours
        return status.st_mtime_ns
    return said


def _remote(fs: Any, location: str) -> Iterator[tuple[int, str, bool]]:
    fs.invalidate_cache()
    names = [location]
    try:
        if not location.endswith(SUFFIX):
            names = [entry["name"] for entry in fs.ls(location, detail=True)]
    except FileNotFoundError:
        return
    for name in names:
        if posixpath.basename(name).endswith(SUFFIX) and fs.isfile(name):
            yield _remote_saved_ns(fs, name), fs.unstrip_protocol(name), False


def _remote_saved_ns(fs: Any, name: str) -> int:
    said = None
    try:
        size = fs.size(name)
        if size:
            start = max(0, size - TAIL_BYTES)
            said = saved_ns(fs.cat_file(name, start=start, end=size))
        if said is None:
            return modified_ns(fs, name)
        return said
    except OSError:  # which will be reported when it is verified
        return 0
