"""What the integers in attributes count that a step moves: rows and hits, which add up over micro-batches, or calls.

A number alone does not say which of these it is. A trial of some rows and of their parts does (:func:`learn_steps`),
and where an integer first moves later, one of that batch (:func:`settle`). What was learned is kept in ``per_row``, a
dict by path, which all functions share. To a path itself belongs whether the last batch with more than a row in a
micro-batch has shown a list that gains an item, or an integer that gains one, for each row; to :func:`adds_up`,
:func:`is_set` and :func:`is_set_to_sum` of the path belongs what their docstrings say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.bridge.step_attributes import AttrPath, Changes, in_words

PerRow: TypeAlias = dict[AttrPath, bool]  # what was learned, see above
Assigned: TypeAlias = Mapping[AttrPath, Any]  # what a run sets attributes to

_ROUNDING = 1e-5  # relative, of what parts move a number by together
UNKNOWN = "Nobody knows what integers count: "  # begins what ``require_known_counts`` raises


def adds_up(where: AttrPath) -> AttrPath:
    """Where `per_row` has whether an integer moves by the sum of what micro-batches would move it by, or as each."""
    return (*where, "adds up")


def is_set(where: AttrPath) -> AttrPath:
    """Where `per_row` has whether an integer is set to the number of rows by each step, whatever it was before."""
    return (*where, "set")


def is_set_to_sum(where: AttrPath) -> AttrPath:
    """Where `per_row` has whether an integer is set by each step to what its parts would set it to together."""
    return (*where, "set to sum")


def are_integers(values: Sequence[Any]) -> bool:
    """Whether all of them are; a bool is none."""
    return all(type(value) is int for value in values)


def is_number(value: Any) -> bool:
    """Whether it is an integer or a float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- by rules --------------------------------------------------------------------------------------------------------


def combined_step(where: AttrPath, steps: list[int], sizes: list[int], per_row: PerRow) -> int:
    """How far a batch moves an integer, by which its micro-batches would: a count of rows or hits, or of calls."""
    # Steps that differ between micro-batches are no count of calls. Where all are the same, a step of 1 is taken for
    # a call and another one for hits, unless it is known better.
    if max(sizes) > 1:
        per_row[where] = steps == sizes
    law = adds_up(where)
    differ = not _are_alike(steps)
    if differ and _count_moving(steps) > 1:
        per_row[law] = True
    if differ or per_row.get(where, False):
        return sum(steps)
    is_call = abs(steps[0]) == 1
    if per_row.get(law, not is_call):
        return sum(steps)
    return steps[0]


def doubtful_counts(changes: Sequence[Changes], per_row: PerRow) -> list[AttrPath]:
    """Integers that all micro-batches move alike, where nobody knows whether these are hits or calls."""
    found = []
    for where, pairs in _pairs_by_path(changes).items():
        if len(pairs) < 2 or not _are_pairs_of_integers(pairs):
            continue
        steps = [after - before for before, after in pairs]
        is_known = per_row.get(where, False) or adds_up(where) in per_row
        if _are_alike(steps) and not is_known:
            found.append(where)
    return found


# ---- by trials -------------------------------------------------------------------------------------------------------


def learn_steps(
    before: Mapping[str, Any],
    whole: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    per_row: PerRow,
) -> None:
    """Learn of numbers and tensors in attributes whether a batch moves them as far as its parts do together.

    Args:
        before: attributes of the module.
        whole: what they were set to for some rows.
        parts: and for parts of these rows.
        per_row: where it is kept.
    """
    for name, after in whole.items():
        start: Any = before.get(name)
        ends: list[Any] = [part.get(name) for part in parts]
        everything = [start, after, *ends]
        if not all(is_number(value) or isinstance(value, Tensor) for value in everything):
            continue
        shapes = {getattr(value, "shape", ()) for value in everything}
        if len(shapes) > 1:
            continue
        moved = torch.as_tensor(after - start).double()
        steps = [torch.as_tensor(end - start).double() for end in ends]
        if not moved.any() and not any(step.any() for step in steps):
            continue
        # An integer that only one part moves may be one at the most for a batch: that the steps add up says nothing.
        shows = type(after) is not int or _count_moving(steps) > 1
        if shows and torch.allclose(torch.stack(steps).sum(0), moved, rtol=_ROUNDING):
            per_row[adds_up((name,))] = True
        elif all(torch.equal(step, moved) for step in steps):
            per_row[adds_up((name,))] = False


@dataclass(frozen=True)
class Moved:
    """An integer, and by how much each micro-batch of a batch moves it."""

    where: AttrPath
    before: int
    steps: list[int]
    is_new: bool = False  # it was not there, and ``before`` is zero


def unknown_counts(changes: Sequence[Changes], per_row: PerRow, members: bool = False) -> list[Moved]:
    """Integers that are moved otherwise than any trial has seen.

    Args:
        changes: by micro-batch.
        per_row: what is known.
        members: whether to look at members of dicts, and at what was not there (None before), as well.
    """
    found = []
    for where, pairs in _pairs_by_path(changes).items():
        if len(where) > 1 and not members:
            continue
        is_new = members and all(before is None for before, _ in pairs)
        if is_new:
            pairs = [(0, after) for _, after in pairs]
        if not _are_pairs_of_integers(pairs):
            continue
        if per_row.get(is_set(where), False) or per_row.get(is_set_to_sum(where), False):
            continue
        steps = [after - before for before, after in pairs]
        steps += [0] * (len(changes) - len(pairs))  # micro-batches that have left it alone
        if not any(steps):
            continue
        # That it counts calls explains steps that are alike, and no others.
        law = per_row.get(adds_up(where))
        if law is None or (law is False and not _are_alike(steps)):
            found.append(Moved(where, pairs[0][0], steps, is_new))
    return found


def unsettled_counts(
    changes: Sequence[Changes],
    per_row: PerRow,
    settled: Mapping[AttrPath, int],
    members: bool = False,
) -> list[Moved]:
    """Those of :func:`unknown_counts` that no trial of this batch has shown yet; one micro-batch leaves no doubt."""
    if len(changes) < 2:
        return []
    return [moved for moved in unknown_counts(changes, per_row, members) if moved.where not in settled]


def settle(
    moved: Moved,
    whole: Assigned,
    parts: Sequence[Assigned],
    per_row: PerRow,
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
    where = moved.where
    before = moved.before
    together = whole.get(where, before) - before
    if moved.is_new:
        return together, None  # set, or the first of a count: the next batch shows that
    steps = [part.get(where, before) - before for part in parts]
    is_sum = together == sum(steps)
    if is_sum and _count_moving(steps) > 1:
        per_row[adds_up(where)] = True
        return before + sum(moved.steps), None
    is_known = adds_up(where) in per_row
    counts_calls = _are_alike(steps) and together == steps[0] != 0
    if counts_calls and not is_known and _are_alike(moved.steps):
        per_row[adds_up(where)] = False
        return before + moved.steps[0], None
    if not is_sum and before + together == sum(before + step for step in steps):
        per_row[is_set_to_sum(where)] = True  # anew by each step, as in `self.rows = len(batch)`
        return before + together, None
    if is_sum and any(steps) and not is_known:
        return before + sum(moved.steps), None
    return before + together, (
        f"{in_words(owner, where)} is moved by {together} for a batch, and by {steps} for its micro-batches: "
        "it counts neither rows nor calls of the step."
    )


def settle_counts(
    unknown: Sequence[Moved],
    whole: Assigned,
    parts: Sequence[Assigned],
    per_row: PerRow,
    settled: dict[AttrPath, int],
    owner: str = "self",
) -> str | None:
    """:func:`settle` each of ``unknown``, and note what it comes to in ``settled``; the first problem."""
    first = None
    for moved in unknown:
        settled[moved.where], problem = settle(moved, whole, parts, per_row, owner)
        first = first or problem
    return first


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _pairs_by_path(changes: Sequence[Changes]) -> dict[AttrPath, list[tuple[Any, Any]]]:
    """What each attribute was and what it came to, in those micro-batches that have set it."""
    found: dict[AttrPath, list[tuple[Any, Any]]] = {}
    for change in changes:
        for where, pair in change.values.items():
            found.setdefault(where, []).append(pair)
    return found


def _are_pairs_of_integers(pairs: Sequence[tuple[Any, Any]]) -> bool:
    return all(are_integers(pair) for pair in pairs)


def _are_alike(steps: Sequence[int]) -> bool:
    return len(set(steps)) == 1


def _count_moving(steps: Sequence[Any]) -> int:
    """How many are not zero: how many micro-batches move the number."""
    return sum(map(bool, steps))
