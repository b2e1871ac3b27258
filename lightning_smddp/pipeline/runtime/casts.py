"""Autocast's copies of weights: one for all micro-batches of a step, not one for each.

Under mixed precision each use of a weight casts it anew, and keeps the copy for its backward: as many copies of all
weights as there are micro-batches in flight. Autocast can remember its casts; but gradients of several uses are summed
in the copy's 16 bits, so nothing is remembered for a step that casts a weight more than once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from lightning_smddp.pipeline.capture.records import Trace


def cast_type(trace: Trace) -> torch.dtype | None:
    """The type that a step casts weights to, each once; None where it does otherwise, so that no copy may be kept.

    In a checkpoint nothing is kept anyway, and its backward may forget all casts, in a thread of its own.
    """
    kinds = {kind for _, kind in trace.casts}
    if len(kinds) != 1 or max(trace.casts.values()) > 1:
        return None
    if any(event.region is not None for event in trace.events):
        return None
    return kinds.pop()


def may_keep_casts(kinds: Collection[torch.dtype | None], device: torch.device) -> bool:
    """Whether steps with these :func:`cast_type` can share copies, under the autocast context that is entered."""
    if not torch.is_autocast_enabled(device.type):
        return False
    entered = torch.get_autocast_dtype(device.type)
    return set(kinds) == {entered}


@contextmanager
def kept_casts() -> Iterator[None]:
    """Keep copies of weights for all autocast contexts inside that are told to look for them: ``look_for_casts``."""
    # torch clears its cache of casts when the outermost autocast context ends. One more level of nesting, without a
    # context of its own, keeps the copies over the micro-batches, each of which enters and leaves autocast.
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def look_for_casts() -> None:
    """Within an autocast context: use the copies that there are, up to its end."""
    torch.set_autocast_cache_enabled(True)
