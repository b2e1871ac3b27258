"""Numbers in attributes that a step moves: what is known of what integers count, and of sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_smddp.bridge.step_attributes import Changes, Place, adds_up, is_set, is_set_to_sum

UNKNOWN = "Nobody knows what integers count: "  # begins what ``require_known_counts`` raises


@dataclass(frozen=True)
class Moved:
    """An integer, and by how much each micro-batch of a batch moves it."""

    place: Place
    before: int
    steps: list[int]
    is_new: bool = False  # it was not there, and ``before`` is zero


def unknown_counts(changes: Sequence[Changes], per_row: Mapping[Place, bool], members: bool = False) -> list[Moved]:
    """Integers that are moved otherwise than any trial has seen.

    Args:
        changes: by micro-batch.
        per_row: see ``combine_changes``.
        members: whether to look at members of dicts, and at what was not there (None before), as well.
    """
    found = []
    for place in dict.fromkeys(place for change in changes for place in change.values):
        pairs = [change.values.get(place) for change in changes]
        known = [pair for pair in pairs if pair is not None]
        is_new = members and all(before is None for before, _ in known)
        if is_new:
            known = [(0, after) for _, after in known]
            pairs = [None if pair is None else (0, pair[1]) for pair in pairs]
        if (len(place) > 1 and not members) or not all(type(value) is int for pair in known for value in pair):
            continue
        steps = [0 if pair is None else pair[1] - pair[0] for pair in pairs]
        if per_row.get(is_set(place), False) or per_row.get(is_set_to_sum(place), False):
            continue
        law = per_row.get(adds_up(place))
        if any(steps) and (law is None or (law is False and len(set(steps)) > 1)):
            found.append(Moved(place, known[0][0], steps, is_new))
    return found


def settle(
    moved: Moved,
    whole: Mapping[Place, Any],
    parts: Sequence[Mapping[Place, Any]],
    per_row: dict[Place, bool],
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
    together = whole.get(moved.place, moved.before) - moved.before
    if moved.is_new:
        return together, None  # set, or the first of a count: the next batch shows that
    steps = [part.get(moved.place, moved.before) - moved.before for part in parts]
    counts_calls = len(set(steps)) == 1 and together == steps[0] != 0 and adds_up(moved.place) not in per_row
    if together == sum(steps) and sum(map(bool, steps)) > 1:
        per_row[adds_up(moved.place)] = True
    elif counts_calls and len(set(moved.steps)) == 1:
        per_row[adds_up(moved.place)] = False
        return moved.before + moved.steps[0], None
    elif together != sum(steps) and moved.before + together == sum(moved.before + step for step in steps):
        per_row[is_set_to_sum(moved.place)] = True  # anew by each step, as in `self.rows = len(batch)`
        return moved.before + together, None
    elif together != sum(steps) or not any(steps) or adds_up(moved.place) in per_row:
        return moved.before + together, (
            f"{in_words(owner, moved.place)} is moved by {together} for a batch, and by {steps} for its micro-batches: "
            "it counts neither rows nor calls of the step."
        )
    return moved.before + sum(moved.steps), None


def in_words(owner: str, place: Place) -> str:
    """An attribute, or a member of a dict that is one, as code would have it."""
    return f"{owner}.{place[0]}" + "".join(f"[{key!r}]" for key in place[1:])
