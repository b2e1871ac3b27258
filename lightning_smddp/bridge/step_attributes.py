"""What a step does to its module's attributes, undone for each micro-batch and done once for the batch.

Two things are followed: lists that grow (attributes, and lists that are members of a list or dict), and attributes
that are set to another tensor, number or string (or a structure of these), or hold a tensor that is changed in place.

Each micro-batch starts from what the attributes were before the batch, and what they came to is combined::

    self.rows += len(batch)        0 -> 4, 0 -> 4    8: a count of rows adds up
    self.calls += 1                0 -> 1, 0 -> 1    1: one call for the batch
    self.losses.append(loss)       [2.0], [4.0]      [3.0]: weighted as the loss is
    self.outputs.append(tensor)    4 rows, 4 rows    one tensor of 8 rows

A number alone does not say which of these it is: a trial of some rows and of their parts does (``learn_steps``), and
where an integer first moves later, one of that batch (``settle``). ``per_row`` keeps what was learned, see ``adds_up``,
``is_set`` and ``is_set_to_sum``.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp.bridge.kept_tensors import StandIns
from lightning_smddp.bridge.logged_values import is_loss, reduce_losses
from lightning_smddp.pipeline.partition.microbatches import combine
from lightning_smddp.wire.pytree import leaves, map_leaves, tensors

AttrPath: TypeAlias = tuple[Any, ...]  # (attribute,), or (attribute, key or position in it)
_MISSING = object()
_ROUNDING = 1e-5  # relative
_MOST_LISTS = 1000  # members of a dict; one with more is data


@dataclass
class Changes:
    """What one micro-batch appended to which list, and what it set attributes to, with what they were."""

    appended: dict[AttrPath, list[Any]] = field(default_factory=dict)
    values: dict[AttrPath, tuple[Any, Any]] = field(default_factory=dict)  # (before, after)
    in_place: frozenset[AttrPath] = frozenset()  # of values: tensors that were written, of the shape that they had


class AttributeWatch:
    """Remembers a module's attributes until :meth:`undo`.

    Args:
        module: whose attributes.
        ignored: names that are left alone.
        in_place: names of tensors that earlier runs were seen to change in place; gains those of this one.
        is_trace: whether any tensor is watched for such changes, not only small ones and those.
    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str], in_place: set[str] | None = None, is_trace: bool = False
    ) -> None:
        self.module, self.ignored = module, ignored
        if in_place is None:
            in_place = set()
        self.in_place = in_place
        self.attributes = {name: value for name, value in vars(module).items() if name not in ignored}
        self.lengths = {where: (found, len(found)) for where, found in self._lists()}
        self._stand_ins = StandIns(vars(module), self.attributes, lambda name: is_trace or name in self.in_place)

    def growth(self) -> dict[AttrPath, list[Any]]:
        """What lists have gained: their new members, by the list's path."""
        tails = {}
        for where, found in self._lists():
            known, length = self.lengths.get(where, (found, 0))
            is_new_member = where not in self.lengths and len(where) > 1
            in_a_tail = is_new_member and isinstance(vars(self.module)[where[0]], list)
            if known is found and len(found) > length and not in_a_tail:
                tails[where] = found[length:]
        return tails

    def assigned(self) -> list[Any]:
        """What attributes were set to, or hold that was changed in place."""
        self.in_place.update(self._stand_ins.changed())
        return [value for name, value in vars(self.module).items() if self._is_kept(name, value)]

    def stands_in(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with a copy that replaces one of the attributes' tensors."""
        return self._stand_ins.have(tensor)

    def settle(self, assigned: Mapping[int, Tensor]) -> None:
        """Let tensors that another stage has changed be what they are here, by id of those :meth:`assigned`."""
        own = vars(self.module)
        for name in self.in_place & own.keys():
            after = assigned.get(id(own[name]))
            if after is not None and after.data_ptr() != own[name].data_ptr():
                own[name] = after

    def _is_kept(self, name: str, value: Any) -> bool:
        if name in self.ignored or value is self.attributes.get(name, _MISSING):
            return False
        return name in self.in_place or not self._stand_ins.is_untouched(name)

    def undo(self) -> Changes:
        """Put the attributes back, and say what had changed."""
        self.in_place.update(self._stand_ins.changed())
        self._stand_ins.take_away()
        changes = Changes(appended=self.growth())
        for where in changes.appended:
            self._cut(where)
        own = vars(self.module)
        for name in [name for name in own if name not in self.ignored]:
            before, after = self.attributes.get(name, _MISSING), own[name]
            if after is before or not all(map(is_plain, leaves(after))):
                continue
            if type(after) is list and type(before) is list and _begins_with(after, before):
                changes.appended[name,] = after[len(before) :]  # `self.list = self.list + [item]`
            else:
                was = before
                if before is _MISSING:  # `self.count += 1` reads the class's `count` the first time
                    was = getattr(type(self.module), name, _MISSING)
                changes.values[name,] = (was, after)
                are_tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
                if name in self.in_place and are_tensors and before.shape == after.shape:
                    changes.in_place |= {(name,)}
            if before is _MISSING:
                del own[name]
            else:
                own[name] = before
        return changes

    def _lists(self) -> Iterator[tuple[AttrPath, list[Any]]]:
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

    def _cut(self, where: AttrPath) -> None:
        found, length = self.lengths.get(where, (None, 0))
        if found is not None:
            del found[length:]
        elif len(where) == 1:
            del vars(self.module)[where[0]]
        else:
            del vars(self.module)[where[0]][where[1]]


def combine_changes(
    changes: Sequence[Changes], sizes: Sequence[int], weights: Sequence[float], per_row: dict[AttrPath, bool]
) -> tuple[list[tuple[AttrPath, list[Any]]], dict[AttrPath, Any]]:
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
    appended: list[tuple[AttrPath, list[Any]]] = []
    for where in dict.fromkeys(where for change in changes for where in change.appended):
        found = [(c.appended[where], size) for c, size in zip(changes, sizes, strict=True) if where in c.appended]
        tails, its_sizes = [tail for tail, _ in found], [size for _, size in found]
        its_weights = [weight for c, weight in zip(changes, weights, strict=True) if where in c.appended]
        if is_loss(where[0]) and (losses := _combine_losses(tails, its_weights)) is not None:
            appended.append((where, losses))
            continue
        if max(its_sizes) > 1:
            per_row[where] = _is_per_row(tails, its_sizes)
        appended.append((where, _combine_tails(tails, its_sizes, per_row.get(where, False))))
    values = {}
    for where in dict.fromkeys(where for change in changes for where in change.values):
        # From the surest to the weakest: integers that are set to the number of rows, integers that are moved, what
        # a trial has shown to add up, losses, tensors that are written, and else whatever `combine` has a rule for.
        pairs = [(c.values[where], size) for c, size in zip(changes, sizes, strict=True) if where in c.values]
        before, after = pairs[0][0][0], [value for (_, value), _ in pairs]
        its_sizes = [size for _, size in pairs]
        are_integers = all(type(value) is int for value in after)
        are_rows, as_set = are_integers and after == its_sizes, is_set(where)
        if before is _MISSING and max(its_sizes) > 1:
            per_row[as_set] = are_rows
        if (are_rows and per_row.get(as_set, False)) or (are_integers and per_row.get(is_set_to_sum(where), False)):
            values[where] = sum(after)
            continue
        if all(type(value) is int for value in [before, *after]):
            values[where] = before + _combine_steps(where, [value - before for value in after], its_sizes, per_row)
            continue
        moves = all(map(_is_number, [before, *after])) or any(where in change.in_place for change in changes)
        if moves and per_row.get(adds_up(where), False):
            values[where] = before + sum(value - before for value in after)
            continue
        losses = None
        if is_loss(where[-1]):
            its_weights = [weight for c, weight in zip(changes, weights, strict=True) if where in c.values]
            losses = _combine_losses([[value] for value in after], its_weights)
        if losses is not None:
            values[where] = losses[0]
        elif any(where in change.in_place for change in changes):
            values[where] = _combine_written(before, after, its_sizes)
        else:
            values[where] = _combine_values(after, its_sizes)
    return appended, values


def _combine_steps(where: AttrPath, steps: list[int], sizes: list[int], per_row: dict[AttrPath, bool]) -> int:
    """How far a batch moves an integer, by which its micro-batches would: a count of rows or hits, or of calls."""
    # Steps that differ between micro-batches are no count of calls. Where all are the same, a step of 1 is taken for
    # a call and another one for hits, unless it is known better.
    if max(sizes) > 1:
        per_row[where] = steps == sizes
    differ = len(set(steps)) > 1
    if differ and sum(map(bool, steps)) > 1:
        per_row[adds_up(where)] = True
    adds = differ or per_row.get(where, False) or per_row.get(adds_up(where), abs(steps[0]) != 1)
    if adds:
        return sum(steps)
    return steps[0]


def adds_up(where: AttrPath) -> AttrPath:
    """Where `per_row` has whether an integer moves by the sum of what micro-batches would move it by, or as each."""
    return (*where, "adds up")


def is_set(where: AttrPath) -> AttrPath:
    """Where `per_row` has whether an integer is set to the number of rows by each step, whatever it was before."""
    return (*where, "set")


def is_set_to_sum(where: AttrPath) -> AttrPath:
    """Where `per_row` has whether an integer is set by each step to what its parts would set it to together."""
    return (*where, "set to sum")


def learn_steps(
    before: Mapping[str, Any],
    whole: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    per_row: dict[AttrPath, bool],
) -> None:
    """Learn of numbers and tensors in attributes whether a batch moves them as far as its parts do together.

    Args:
        before: attributes of the module.
        whole: what they were set to for some rows.
        parts: and for parts of these rows.
        per_row: where it is kept.
    """
    for name, after in whole.items():
        start, ends = before.get(name), [part.get(name) for part in parts]
        everything = [start, after, *ends]
        if not all(_is_number(value) or isinstance(value, Tensor) for value in everything):
            continue
        if len({getattr(value, "shape", ()) for value in everything}) > 1:
            continue
        moved, *steps = [torch.as_tensor(value - start).double() for value in [after, *ends]]
        if not any(step.any() for step in [moved, *steps]):
            continue
        shows = type(after) is not int or sum(map(bool, steps)) > 1  # else it may be one at the most for a batch
        if shows and torch.allclose(torch.stack(steps).sum(0), moved, rtol=_ROUNDING):
            per_row[adds_up((name,))] = True
        elif all(torch.equal(step, moved) for step in steps):
            per_row[adds_up((name,))] = False


def doubtful_counts(changes: Sequence[Changes], per_row: Mapping[AttrPath, bool]) -> list[AttrPath]:
    """Integers that all micro-batches move alike, where nobody knows whether these are hits or calls."""
    found = []
    for where in dict.fromkeys(where for change in changes for where in change.values):
        pairs = [change.values[where] for change in changes if where in change.values]
        if all(type(value) is int for pair in pairs for value in pair):
            steps = {after - before for before, after in pairs}
            if len(pairs) > 1 and len(steps) == 1 and not per_row.get(where, False) and adds_up(where) not in per_row:
                found.append(where)
    return found


def apply_changes(module: nn.Module, appended: Sequence[tuple[AttrPath, list[Any]]], values: Mapping[str, Any]) -> None:
    """Do to ``module`` what the batch did."""
    own = vars(module)
    own.update(values)
    for where, tail in appended:
        if len(where) == 1:
            own.setdefault(where[0], []).extend(tail)
        elif isinstance(own.get(where[0]), dict):
            own[where[0]].setdefault(where[1], []).extend(tail)
        else:
            own[where[0]][where[1]].extend(tail)


def _is_per_row(tails: list[list[Any]], sizes: list[int]) -> bool:
    """Whether there is an item for each row; items that have the micro-batch's rows themselves are none."""
    for tail, size in zip(tails, sizes, strict=True):
        if len(tail) != size:
            return False
        if any(tensor.dim() and tensor.shape[0] == size for tensor in tensors(tail)):
            return False
    return True


def _combine_tails(tails: list[list[Any]], sizes: list[int], per_row: bool) -> list[Any]:
    everything = list(chain.from_iterable(tails))
    if len(tails) == 1 or per_row or not _are_as_long(tails):
        return everything
    try:
        return [combine(list(at_once), sizes) for at_once in zip(*tails, strict=True)]
    except ValueError:  # no value stands for all micro-batches', so the list gets each of them
        return everything


def _combine_losses(tails: list[list[Any]], weights: Sequence[float]) -> list[Any] | None:
    """Losses that each micro-batch appended or set, as the loss is weighted; None if they are no single numbers."""
    if not all(map(_is_one_float, chain.from_iterable(tails))) or not _are_as_long(tails):
        return None
    return [reduce_losses(list(at_once), weights) for at_once in zip(*tails, strict=True)]


def _are_as_long(tails: list[list[Any]]) -> bool:
    return len({len(tail) for tail in tails}) == 1


def _is_one_float(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dim() == 0 and item.is_floating_point()
    return isinstance(item, float)


def _combine_written(before: Tensor, after: list[Tensor], sizes: list[int]) -> Tensor:
    """What a tensor that is changed in place comes to: counts add up, anything else is a mean."""
    if not (before.is_floating_point() or before.is_complex()):
        return before + sum(value - before for value in after)
    total = torch.zeros_like(before)
    for value, size in zip(after, sizes, strict=True):
        total = total + value * size
    return total / sum(sizes)


def _combine_values(values: list[Any], sizes: list[int]) -> Any:
    """What the batch sets an attribute to; where there is no rule, what the last micro-batch set it to."""
    if not any(tensors(value) for value in values) and all(value == values[0] for value in values):
        return values[0]
    try:
        return combine(values, sizes)
    except ValueError:
        return values[-1]


def detached(structure: Any) -> Any:
    """``structure`` with its tensors off the graph; those that are stay the objects that they are."""

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return leaf.detach()
        return leaf

    return map_leaves(detach, structure)


def _begins_with(longer: list[Any], shorter: list[Any]) -> bool:
    return len(longer) >= len(shorter) and all(map(operator.is_, longer, shorter))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_plain(leaf: Any) -> bool:
    """Whether an attribute that is set to it can be followed: a tensor, a number, text or None."""
    return leaf is None or isinstance(leaf, (Tensor, numbers.Number, str))


UNKNOWN = "Nobody knows what integers count: "  # begins what ``require_known_counts`` raises


@dataclass(frozen=True)
class Moved:
    """An integer, and by how much each micro-batch of a batch moves it."""

    where: AttrPath
    before: int
    steps: list[int]
    is_new: bool = False  # it was not there, and ``before`` is zero


def unknown_counts(changes: Sequence[Changes], per_row: Mapping[AttrPath, bool], members: bool = False) -> list[Moved]:
    """Integers that are moved otherwise than any trial has seen.

    Args:
        changes: by micro-batch.
        per_row: see ``combine_changes``.
        members: whether to look at members of dicts, and at what was not there (None before), as well.
    """
    found = []
    for where in dict.fromkeys(where for change in changes for where in change.values):
        known = [change.values[where] for change in changes if where in change.values]
        is_new = members and all(before is None for before, _ in known)
        if is_new:
            known = [(0, after) for _, after in known]
        if (len(where) > 1 and not members) or not all(type(value) is int for pair in known for value in pair):
            continue
        steps = [after - before for before, after in known]
        steps += [0] * (len(changes) - len(known))  # micro-batches that have left it alone
        if per_row.get(is_set(where), False) or per_row.get(is_set_to_sum(where), False):
            continue
        law = per_row.get(adds_up(where))
        if any(steps) and (law is None or (law is False and len(set(steps)) > 1)):
            found.append(Moved(where, known[0][0], steps, is_new))
    return found


def settle(
    moved: Moved,
    whole: Mapping[AttrPath, Any],
    parts: Sequence[Mapping[AttrPath, Any]],
    per_row: dict[AttrPath, bool],
    owner: str = "self",
) -> tuple[int, str | None]:
    """What the integer comes to for the batch; and what is wrong if it counts neither rows nor calls.

    Args:
        moved: an integer.
        whole: what a run of the batch at once sets attributes to.
        parts: and runs of its micro-batches.
        per_row: gains what is found out for sure: where one micro-batch alone moves it, the sum says nothing.
        owner: of the attribute, for messages.
    """
    # With `together` what the whole batch moves it by, and `steps` what its micro-batches do:
    #   together == sum(steps)                    it counts rows or hits
    #   together == each of steps                 it counts calls
    #   before + together == sum(before + step)   it is set anew by each step, to what adds up
    together = whole.get(moved.where, moved.before) - moved.before
    if moved.is_new:
        return together, None  # set, or the first of a count: the next batch shows that
    steps = [part.get(moved.where, moved.before) - moved.before for part in parts]
    counts_calls = len(set(steps)) == 1 and together == steps[0] != 0 and adds_up(moved.where) not in per_row
    if together == sum(steps) and sum(map(bool, steps)) > 1:
        per_row[adds_up(moved.where)] = True
    elif counts_calls and len(set(moved.steps)) == 1:
        per_row[adds_up(moved.where)] = False
        return moved.before + moved.steps[0], None
    elif together != sum(steps) and moved.before + together == sum(moved.before + step for step in steps):
        per_row[is_set_to_sum(moved.where)] = True  # anew by each step, as in `self.rows = len(batch)`
        return moved.before + together, None
    elif together != sum(steps) or not any(steps) or adds_up(moved.where) in per_row:
        return moved.before + together, (
            f"{in_words(owner, moved.where)} is moved by {together} for a batch, and by {steps} for its micro-batches: "
            "it counts neither rows nor calls of the step."
        )
    return moved.before + sum(moved.steps), None


def unsettled_counts(
    changes: Sequence[Changes], per_row: Mapping[AttrPath, bool], settled: Mapping[AttrPath, int], members: bool = False
) -> list[Moved]:
    """Those of :func:`unknown_counts` that no trial of this batch has shown yet; one micro-batch leaves no doubt."""
    if len(changes) < 2:
        return []
    return [moved for moved in unknown_counts(changes, per_row, members) if moved.where not in settled]


def settle_counts(
    unknown: Sequence[Moved],
    whole: Mapping[AttrPath, Any],
    parts: Sequence[Mapping[AttrPath, Any]],
    per_row: dict[AttrPath, bool],
    settled: dict[AttrPath, int],
    owner: str = "self",
) -> str | None:
    """:func:`settle` each of ``unknown``, and note what it comes to in ``settled``; the first problem."""
    first = None
    for moved in unknown:
        settled[moved.where], problem = settle(moved, whole, parts, per_row, owner)
        first = first or problem
    return first


def in_words(owner: str, where: AttrPath) -> str:
    """An attribute, or a member of a dict that is one, as code would have it."""
    keys = [f"[{key!r}]" for key in where[1:]]
    return f"{owner}.{where[0]}{''.join(keys)}"
