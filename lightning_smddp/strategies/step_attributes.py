"""What a step does to its module's attributes, undone for each micro-batch and done once for the batch.

Two things are followed: lists that grow (attributes, and lists that are members of a list or dict), and attributes
that are set to another tensor, number or string (or a structure of these). Changes in place of tensors are not.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_smddp.pipeline.microbatches import combine
from lightning_smddp.pipeline.structure import leaves, map_leaves, tensors
from lightning_smddp.strategies.step_values import is_loss, reduce_losses

Place: TypeAlias = tuple[Any, ...]  # (attribute,), or (attribute, key or position in it)
_MISSING = object()
_MOST_LISTS = 1000  # members of a dict; one with more is data


@dataclass
class Changes:
    """What one micro-batch appended to which list, and what it set attributes to, with what they were."""

    appended: dict[Place, list[Any]] = field(default_factory=dict)
    values: dict[Place, tuple[Any, Any]] = field(default_factory=dict)  # (before, after)


class AttributeWatch:
    """Remembers a module's attributes until :meth:`undo`. Names in ``ignored`` are left alone."""

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self.module, self.ignored = module, ignored
        self.attributes = {name: value for name, value in vars(module).items() if name not in ignored}
        self.lengths = {place: (found, len(found)) for place, found in self._lists()}

    def growth(self) -> dict[Place, list[Any]]:
        """What lists have gained."""
        tails = {}
        for place, found in self._lists():
            known, length = self.lengths.get(place, (found, 0))
            in_a_tail = place not in self.lengths and isinstance(vars(self.module)[place[0]], list) and len(place) > 1
            if known is found and len(found) > length and not in_a_tail:
                tails[place] = found[length:]
        return tails

    def assigned(self) -> list[Any]:
        """What attributes were set to."""
        own = vars(self.module)
        names = [name for name in own if name not in self.ignored]
        return [own[name] for name in names if own[name] is not self.attributes.get(name, _MISSING)]

    def undo(self) -> Changes:
        """Put the attributes back, and say what had changed."""
        changes = Changes(appended=self.growth())
        for place in changes.appended:
            self._cut(place)
        own = vars(self.module)
        for name in [name for name in own if name not in self.ignored]:
            before, after = self.attributes.get(name, _MISSING), own[name]
            if after is before or not all(map(is_plain, leaves(after))):
                continue
            if type(after) is list and type(before) is list and _begins_with(after, before):
                changes.appended[name,] = after[len(before) :]  # `self.list = self.list + [item]`
            else:
                changes.values[name,] = (before, after)
            if before is _MISSING:
                del own[name]
            else:
                own[name] = before
        return changes

    def _lists(self) -> Iterator[tuple[Place, list[Any]]]:
        for name, value in vars(self.module).items():
            if name in self.ignored or self.attributes.get(name, value) is not value:
                continue
            members: Any = ()
            if type(value) is list:
                yield (name,), value
                if value and type(value[0]) is list:
                    members = enumerate(value)
            elif isinstance(value, dict) and len(value) <= _MOST_LISTS:
                members = value.items()
            for key, member in members:
                if type(member) is list:
                    yield (name, key), member

    def _cut(self, place: Place) -> None:
        found, length = self.lengths.get(place, (None, 0))
        if found is not None:
            del found[length:]
        elif len(place) == 1:
            del vars(self.module)[place[0]]
        else:
            del vars(self.module)[place[0]][place[1]]


def combine_changes(
    changes: Sequence[Changes], sizes: Sequence[int], weights: Sequence[float], per_row: dict[Place, bool]
) -> tuple[list[tuple[Place, list[Any]]], dict[Place, Any]]:
    """What the batch would have appended and set, from what its micro-batches did.

    A list gains what one call would have appended: one item for each position, or one for each row where the step
    appends so. An attribute for which there is no rule is what the last micro-batch set it to.

    Args:
        changes: by micro-batch.
        sizes: rows of the micro-batches.
        weights: of their losses, for what is named so.
        per_row: which lists gain an item for each row, and which integers count rows. Kept from step to step:
            micro-batches of one row do not show it.
    """
    appended: list[tuple[Place, list[Any]]] = []
    for place in dict.fromkeys(place for change in changes for place in change.appended):
        found = [(c.appended[place], size) for c, size in zip(changes, sizes, strict=True) if place in c.appended]
        tails, its_sizes = [tail for tail, _ in found], [size for _, size in found]
        its_weights = [weight for c, weight in zip(changes, weights, strict=True) if place in c.appended]
        if is_loss(place[0]) and (losses := _combine_losses(tails, its_weights)) is not None:
            appended.append((place, losses))
            continue
        if max(its_sizes) > 1:
            per_row[place] = _is_per_row(tails, its_sizes)
        appended.append((place, _combine_tails(tails, its_sizes, per_row.get(place, False))))
    values = {}
    for place in dict.fromkeys(place for change in changes for place in change.values):
        pairs = [(c.values[place], size) for c, size in zip(changes, sizes, strict=True) if place in c.values]
        before, after = pairs[0][0][0], [value for (_, value), _ in pairs]
        its_sizes = [size for _, size in pairs]
        are_rows, as_set = all(type(value) is int for value in after) and after == its_sizes, (*place, "set")
        if before is _MISSING and max(its_sizes) > 1:
            per_row[as_set] = are_rows
        if are_rows and per_row.get(as_set, False):
            values[place] = sum(after)
            continue
        if all(type(value) is int for value in [before, *after]):
            steps = [value - before for value in after]
            if max(its_sizes) > 1:
                per_row[place] = steps == its_sizes
            adds_up = per_row.get(place, False) or len(set(steps)) > 1
            values[place] = before + (sum(steps) if adds_up else steps[0])
            continue
        its_weights = [weight for c, weight in zip(changes, weights, strict=True) if place in c.values]
        losses = _combine_losses([[value] for value in after], its_weights) if is_loss(place[-1]) else None
        values[place] = _combine_values(after, its_sizes) if losses is None else losses[0]
    return appended, values


def apply_changes(module: nn.Module, appended: Sequence[tuple[Place, list[Any]]], values: Mapping[str, Any]) -> None:
    """Do to ``module`` what the batch did."""
    own = vars(module)
    own.update(values)
    for place, tail in appended:
        if len(place) == 1:
            own.setdefault(place[0], []).extend(tail)
        elif isinstance(own.get(place[0]), dict):
            own[place[0]].setdefault(place[1], []).extend(tail)
        else:
            own[place[0]][place[1]].extend(tail)


def _is_per_row(tails: list[list[Any]], sizes: list[int]) -> bool:
    """Whether there is an item for each row; items that have the micro-batch's rows themselves are none."""
    return [len(tail) for tail in tails] == sizes and not any(
        tensor.dim() and tensor.shape[0] == size
        for tail, size in zip(tails, sizes, strict=True)
        for tensor in tensors(tail)
    )


def _combine_tails(tails: list[list[Any]], sizes: list[int], per_row: bool) -> list[Any]:
    everything = [item for tail in tails for item in tail]
    if len(tails) == 1 or per_row or len({len(tail) for tail in tails}) > 1:
        return everything
    try:
        return [combine([tail[i] for tail in tails], sizes) for i in range(len(tails[0]))]
    except ValueError:  # no value stands for all micro-batches', so the list gets each of them
        return everything


def _combine_losses(tails: list[list[Any]], weights: Sequence[float]) -> list[Any] | None:
    """Losses that each micro-batch appended or set, as the loss is weighted; None if they are no single numbers."""
    numbers_only = all(
        isinstance(item, float) or (isinstance(item, Tensor) and item.dim() == 0 and item.is_floating_point())
        for tail in tails
        for item in tail
    )
    if not numbers_only or len({len(tail) for tail in tails}) > 1:
        return None
    return [reduce_losses([tail[index] for tail in tails], weights) for index in range(len(tails[0]))]


def _combine_values(values: list[Any], sizes: list[int]) -> Any:
    """What an attribute is set to; where there is no rule, what the last micro-batch set it to."""
    if not any(tensors(value) for value in values) and all(value == values[0] for value in values):
        return values[0]
    try:
        return combine(values, sizes)
    except ValueError:
        return values[-1]


def detached(structure: Any) -> Any:
    """``structure`` with its tensors off the graph; those that are stay the objects that they are."""
    return map_leaves(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, structure
    )


def _begins_with(longer: list[Any], shorter: list[Any]) -> bool:
    return len(longer) >= len(shorter) and all(map(operator.is_, longer, shorter))


def is_plain(leaf: Any) -> bool:
    """Whether an attribute that is set to it can be followed: a tensor, a number, text or None."""
    return leaf is None or isinstance(leaf, (Tensor, numbers.Number, str))
