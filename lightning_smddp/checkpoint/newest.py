"""The newest checkpoint that is whole, among all that a run has left."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

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
        damages = gather(_damage(path, is_first), group)
        damage = damages[0]
        blind = {rank: why for rank, why in enumerate(damages) if why is not None}
        if damage is None and blind:
            fix = "Write checkpoints to a directory that all nodes share, or to a URL."
            named = ", ".join(f"rank {rank} ({why})" for rank, why in blind.items())
            raise CheckpointError(path, f"rank 0 can read it, others cannot: {named}", fix)
        if damage is None:
            return path
        if is_first:
            report(f"Skipped a newer checkpoint that cannot be used: {damage}")
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
    candidates = {candidate for location in locations for candidate in _found(location)}
    return [path for _, path in sorted(candidates, reverse=True)]


def _found(location: AnyPath) -> Iterator[tuple[float, str]]:
    """Time of the last change, in seconds since 1970, and path of each checkpoint at a location."""
    remote, name = files.locate(location)
    fs = remote or LocalFileSystem()
    fs.invalidate_cache()
    try:
        paths = [name] if name.endswith(_SUFFIXES) else fs.ls(name, detail=False)
    except FileNotFoundError:
        return
    for path in paths:
        # Not what a killed run has left half written.
        if not path.endswith(_SUFFIXES) or os.path.basename(path).startswith(".tmp-"):
            continue
        if fs.isfile(path) or (remote is None and sharded.is_ours(path)):
            yield fs.modified(path).timestamp(), path if remote is None else fs.unstrip_protocol(path)
