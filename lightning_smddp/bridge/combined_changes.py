"""What the micro-batches of a batch have done to attributes, put together: what one step on the batch would have done.

The watch over attributes is in ``step_attributes.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.bridge.logged_values import is_loss, reduce_losses
from lightning_smddp.bridge.step_attributes import AttrPath, Changes
from lightning_smddp.pipeline.partition.outputs import merge_outputs
from lightning_smddp.wire.pytree import tensors


@dataclass
class _Found:
    """What some micro-batches did in one place, others having left it alone; lists of the same length.

    Attributes:
        before: what the attribute was for the first of them.
        values: what each appended, or what it set the attribute to.
        sizes: their rows.
        weights: of their losses.
    """

    before: Any = None
    values: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, value: Any, size: int, weight: float) -> None:
        self.values.append(value)
        self.sizes.append(size)
        self.weights.append(weight)


def combine_changes(
    changes: Sequence[Changes],
    sizes: Sequence[int],
    weights: Sequence[float],
    per_row: dict[AttrPath, bool],
) -> tuple[list[tuple[AttrPath, list[Any]]], dict[AttrPath, Any]]:
    """What the batch would have appended and set, from what its micro-batches did.

    A list gains what one call would have appended: one item for each position, or one for each row where the step
    appends so. An attribute for which there is no rule is what the last micro-batch set it to.

    Args:
        changes: by micro-batch.
        sizes: rows of the micro-batches.
        weights: of their losses, for what is named so.
        per_row: which lists gain an item for each row. Kept from step to step: micro-batches of one row do not show it.
    """
    # By place, what those micro-batches did that did something there: [{a: x}, {a: y, b: z}] -> {a: [x, y], b: [z]}.
    gained: dict[AttrPath, _Found] = {}
    assigned: dict[AttrPath, _Found] = {}
    written: set[AttrPath] = set()
    for change, size, weight in zip(changes, sizes, weights, strict=True):
        for where, tail in change.appended.items():
            gained.setdefault(where, _Found()).add(tail, size, weight)
        for where, (before, after) in change.values.items():
            assigned.setdefault(where, _Found(before)).add(after, size, weight)
        written |= change.in_place
    appended = []
    for where, found in gained.items():
        appended.append((where, _combine_gained(where, found, per_row)))
    values = {}
    for where, found in assigned.items():
        values[where] = _combine_assigned(where, found, where in written)
    return appended, values


def _combine_gained(where: AttrPath, found: _Found, per_row: dict[AttrPath, bool]) -> list[Any]:
    """What a list gains for the batch."""
    if is_loss(where[0]):
        losses = _combine_losses(found.values, found.weights)
        if losses is not None:
            return losses
    if max(found.sizes) > 1:
        per_row[where] = _is_per_row(found.values, found.sizes)
    return _combine_tails(found.values, found.sizes, per_row.get(where, False))


def _combine_assigned(where: AttrPath, found: _Found, is_written: bool) -> Any:
    """What an attribute is set to for the batch, by the first rule that applies.

    Numbers that are moved have moved for each micro-batch; losses are weighted as the loss is; tensors that are written
    in place; and else whatever ``merge_outputs`` has a rule for.
    """
    before, after = found.before, found.values
    if all(type(value) in (int, float) for value in [before, *after]):
        return before + sum(value - before for value in after)
    if is_loss(where[-1]):
        losses = _combine_losses([[value] for value in after], found.weights)
        if losses is not None:
            return losses[0]
    if is_written:
        return _combine_written(before, after, found.sizes)
    return _combine_values(after, found.sizes)


# ---- lists -----------------------------------------------------------------------------------------------------------


def _is_per_row(tails: list[list[Any]], sizes: list[int]) -> bool:
    """Whether there is an item for each row; items that have the micro-batch's rows themselves are none."""
    for tail, size in zip(tails, sizes, strict=True):
        if len(tail) != size:
            return False
        if any(tensor.dim() and tensor.shape[0] == size for tensor in tensors(tail)):
            return False
    return True


def _combine_tails(tails: list[list[Any]], sizes: list[int], per_row: bool) -> list[Any]:
    # Items of one position stand for one call: [[a0, b0], [a1, b1]] -> [a of the batch, b of the batch]. Where there is
    # an item for each row, or numbers of items differ, the batch's list is one behind the other.
    everything = list(chain.from_iterable(tails))
    if len(tails) == 1 or per_row or not _are_as_long(tails):
        return everything
    try:
        return [merge_outputs(list(at_once), sizes, sizes) for at_once in zip(*tails, strict=True)]
    except ValueError:  # no value stands for all micro-batches', so the list gets each of them
        return everything


def _combine_losses(tails: list[list[Any]], weights: Sequence[float]) -> list[Any] | None:
    """Losses that each micro-batch appended or set, as the loss is weighted; None if they are no single numbers."""
    if not _are_as_long(tails):
        return None
    for item in chain.from_iterable(tails):
        if not _is_one_float(item):
            return None
    return [reduce_losses(list(at_once), weights) for at_once in zip(*tails, strict=True)]


def _are_as_long(tails: list[list[Any]]) -> bool:
    return len({len(tail) for tail in tails}) == 1


def _is_one_float(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dim() == 0 and item.is_floating_point()
    return isinstance(item, float)


# ---- values ----------------------------------------------------------------------------------------------------------


def _combine_written(before: Tensor, after: list[Tensor], sizes: list[int]) -> Tensor:
    """What a tensor that is changed in place comes to: counts add up, anything else is a mean."""
    if not (before.is_floating_point() or before.is_complex()):
        return before + sum(value - before for value in after)
    # Running statistics, say: each micro-batch went on from `before`, and counts as much as it has rows.
    total = torch.zeros_like(before)
    for value, size in zip(after, sizes, strict=True):
        total = total + value * size
    return total / sum(sizes)


def _combine_values(values: list[Any], sizes: list[int]) -> Any:
    """What the batch sets an attribute to; where there is no rule, what the last micro-batch set it to."""
    has_tensors = any(tensors(value) for value in values)
    if not has_tensors and all(value == values[0] for value in values):
        return values[0]
    try:
        return merge_outputs(values, sizes, sizes)
    except ValueError:
        return values[-1]
