"""Tensors whose size depends on values: stages that do not have the values do not know it.

Where the values are the batch's, every stage has them, and each size is another path. Where they are a module's, only
the stage that made them can follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.records import Deciding, Trace

_OF_ALL = {"argwhere", "nonzero", "unique", "unique_consecutive"}
# What comes behind the first argument decides. (Of rows that were packed the lengths have decided already.)
_OF_THE_REST = {"masked_select", "repeat_interleave", "_pack_padded_sequence"}


def deciding_tensors(name: str, arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors whose values decide on the size of what an operation returns. ``arguments`` are its leaves."""
    if name == "__getitem__":
        return [leaf for leaf in arguments[1:] if isinstance(leaf, Tensor) and leaf.dtype is torch.bool]
    alone = len(arguments) == 1 and name in ("where", "repeat_interleave")
    if alone or name in _OF_ALL:
        return [leaf for leaf in arguments if isinstance(leaf, Tensor)]
    if name in _OF_THE_REST:
        return [leaf for leaf in arguments[1:] if isinstance(leaf, Tensor)]
    return []


def varying(trace: Trace, root: nn.Module, deciding: Deciding) -> frozenset[int]:
    """The values of a trace whose size depends on values, those of ``deciding``.

    What is made of such a tensor may be of a fixed size again: a mean, or rows that are put back in their places. So
    sizes are told by their numbers: one that also belongs to parameters or to other values is fixed, unless it is one
    of those that vary.
    """
    made: dict[int, list[int]] = defaultdict(list)
    for known in trace.values:
        made[known.event].append(known.index)
    fixed = {1}.union(*(parameter.shape for parameter in root.parameters()))
    found: dict[int, frozenset[int]] = {}
    for event in trace.events:
        given = frozenset[int]().union(*(found.get(value, frozenset()) for value in event.inputs))
        if deciding is Deciding.BATCH:
            given |= event.batch_sizes
        before = {rebind.new: rebind.old for rebind in event.mutated}
        for value in made[event.index]:
            shape = trace.values[value].shape
            sizes = frozenset[int]()
            old = before.get(value)
            if value not in before:
                sizes = sizes_that_vary(shape, given, fixed, event.decided_by is deciding)
            elif old is not None:  # a change in place changes no size
                sizes = found.get(old, sizes)
            if sizes:
                found[value] = sizes
            else:
                fixed.update(shape)
    return frozenset(found)


def sizes_that_vary(shape: Sequence[int], given: frozenset[int], fixed: set[int], makes: bool) -> frozenset[int]:
    """Those of a result's sizes that vary, if ``given`` ones of its arguments do, or if it ``makes`` such a size."""
    if not (given or makes):
        return frozenset()
    varying = frozenset(size for size in shape if size in given or size not in fixed)
    if makes and not varying:
        return frozenset(shape[:1])  # all rows may have been chosen, this time
    return varying
