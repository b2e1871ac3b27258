"""The newest checkpoint that is whole, among all that a run has left."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from lightning_smddp.checkpoint import files, sharded
from lightning_smddp.checkpoint.files import AnyPath, CheckpointError
from lightning_smddp.communication.objects import first

_log = logging.getLogger(__name__)
_SUFFIXES = (".ckpt", files.previous_of(".ckpt"))


def newest_checkpoint(
    locations: Iterable[AnyPath],
    report: Callable[[str], None] = _log.warning,
    group: dist.ProcessGroup | None = None,
) -> str | None:
    """The valid checkpoint that was changed last, or None. Collective: the first rank looks, for all.

    Args:
        locations: directories and URLs whose ``*.ckpt`` are looked at, and such files themselves; the first rank's
            count. Those that do not exist are passed over.
        report: is called on the first rank with a line for each newer one that is not valid.
        group: None for all ranks, or this process alone if it is in no group.
    """

    def look() -> str | None:
        candidates = {candidate for location in locations for candidate in _found(location)}
        for _, path in sorted(candidates, reverse=True):
            try:
                (sharded if sharded.is_sharded(path) else files).verify(path)
                return path
            except (CheckpointError, OSError) as error:
                report(f"Skipped a newer checkpoint that cannot be used: {error}")
        return None

    found: str | None = first(look, group)
    return found


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
