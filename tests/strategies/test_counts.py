"""What is known of integers that a step moves, and what a trial shows of them."""

from __future__ import annotations

import pytest

from lightning_smddp.bridge.attribute_counts import Moved, adds_up, settle, unknown_counts
from lightning_smddp.bridge.step_attributes import AttrPath, Changes

PLACE: AttrPath = ("n",)
LAW = adds_up(PLACE)


@pytest.mark.parametrize(
    ("steps", "known", "is_unknown"),
    [
        ([1, 1], {}, True),
        ([1, 0], {}, True),
        ([0, 0], {}, False),
        ([1, 1], {LAW: True}, False),
        ([1, 0], {LAW: True}, False),
        ([1, 1], {LAW: False}, False),
        ([1, 0], {LAW: False}, True),
    ],
)
def test_unknown(steps: list[int], known: dict[AttrPath, bool], is_unknown: bool) -> None:
    changes = [Changes(values={PLACE: (7, 7 + step)} if step else {}) for step in steps]
    assert unknown_counts(changes, known) == ([Moved(PLACE, 7, steps)] if is_unknown else [])


@pytest.mark.parametrize(
    ("steps", "whole", "known", "expected", "law", "is_wrong"),
    [
        ([1, 1], 2, {}, 9, True, False),  # rows
        ([3, 1], 4, {}, 11, True, False),
        ([1, 1], 1, {}, 8, False, False),  # calls
        ([3, 3], 3, {}, 10, False, False),  # or what is set
        ([1, 0], 1, {}, 8, None, False),  # rows, or whether there are any: nobody knows yet
        ([1, 0], 0, {}, 7, None, True),  # whether all are
        ([3, 1], 2, {}, 9, None, True),
        ([1, 0], 1, {LAW: False}, 8, False, True),  # no calls either
        ([1, 2], 3, {LAW: False}, 10, True, False),
    ],
)
def test_settled(
    steps: list[int], whole: int, known: dict[AttrPath, bool], expected: int, law: bool | None, is_wrong: bool
) -> None:
    parts = [{PLACE: 7 + step} if step else {} for step in steps]
    value, problem = settle(Moved(PLACE, 7, steps), {PLACE: 7 + whole}, parts, known)
    assert (value, known.get(LAW), problem is not None) == (expected, law, is_wrong)
