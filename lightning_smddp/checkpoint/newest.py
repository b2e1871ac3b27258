"""The newest checkpoint that is whole, among all that a run has left."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist

from lightning_smddp.checkpoint import files, sharded
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.files import AnyPath
from lightning_smddp.communication.objects import first, gather

_log = logging.getLogger(__name__)
_SUFFIXES = (".ckpt", files.previous_of(".ckpt"))


def newest_checkpoint(
    locations: Iterable[AnyPath],
    report: Callable[[str], None] = _log.warning,
    group: dist.ProcessGroup | None = None,
) -> str | None:
    """The valid checkpoint that was changed last, or None. Collective, with the same result on each rank.

    The first rank looks what there is. Then all verify it, as one that waits for another for as long as it takes to
    read a large file would give it up.

    Args:
        locations: directories and URLs whose ``*.ckpt`` are looked at, and such files themselves; the first rank's
            count. Those that do not exist are passed over.
        report: is called on the first rank with a line for each newer one that is not valid.
        group: None for all ranks, or this process alone if it is in no group.

    Raises:
        CheckpointError: on every rank: one that the first rank can read cannot be read by another.
    """
    group = group or dist.group.WORLD
    is_first = group is None or group.rank() == 0
    candidates: list[str] = first(lambda: _newest_first(locations), group)
    for path in candidates:
        told = gather((_damage(path, is_first), socket.gethostname()), group)
        damage, _ = told[0]
        if damage is not None:
            if is_first:
                report(f"Skipped a newer checkpoint that cannot be used: {damage}")
            continue
        blind = [f"rank {rank} on {host} cannot ({why})" for rank, (why, host) in enumerate(told) if why is not None]
        if blind:
            fix = "Write checkpoints to a directory that all nodes share, or to a URL."
            raise CheckpointError(path, f"rank 0 can read it, but {', '.join(blind)}", fix)
        return path
    return None


def _damage(path: str, is_first: bool) -> str | None:
    """Why this rank cannot use a checkpoint; None if it can. Of a URL the first rank alone looks."""
    try:
        if sharded.is_sharded(path):
            sharded.verify(path)
        elif is_first or "://" not in path:
            files.verify(path)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _newest_first(locations: Iterable[AnyPath]) -> list[str]:
    candidates: set[tuple[float, str]] = set()
    for location in locations:
        fs, name = files.locate(location)
        if fs is None:
            candidates.update(_local(name))
        else:
            candidates.update(_remote(fs, name))
    return [path for _, path in sorted(candidates, reverse=True)]


def _local(location: str) -> Iterator[tuple[float, str]]:
    """Time of the last change, in seconds since 1970, and path of each checkpoint."""
    paths = [location]
    if os.path.isdir(location) and not location.endswith(_SUFFIXES):
        paths = [os.path.join(location, name) for name in os.listdir(location)]
    for path in paths:
        is_file = not os.path.isdir(path)
        if _is_name(path) and os.path.exists(path) and (is_file or sharded.is_ours(path)):
            yield os.path.getmtime(path), path


def _remote(fs: Any, location: str) -> Iterator[tuple[float, str]]:
    fs.invalidate_cache()
    try:
        names = [location] if location.endswith(_SUFFIXES) else fs.ls(location, detail=False)
    except FileNotFoundError:
        return
    for name in names:
        if _is_name(name) and fs.isfile(name):
            yield fs.modified(name).timestamp(), fs.unstrip_protocol(name)


def _is_name(path: str) -> bool:
    """Whether it is a checkpoint's, and not of one that a killed run has left half written."""
    return path.endswith(_SUFFIXES) and not os.path.basename(path).startswith(".tmp-")
