"""Sums through shared memory are looked at while they are made: what is not finite is known to all ranks at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.communication.test_shared_memory import memory_of
from tests.ranks import run_in_threads

HUGE, INF, NAN = 3e38, float("inf"), float("nan")
LAST = 150_002  # of a tensor with several chunks for each rank


def reduce_watched(
    group: dist.ProcessGroup, copied: set[int], bad: dict[int, dict[int, float]]
) -> tuple[list[bool], list[int], bool]:
    """Returns whether sums were finite in steps with and without ``bad``, and where this rank's own were not."""
    kept, answers, places = torch.empty(LAST + 1), [], []
    with memory_of(group, zero_copy=group.rank() not in copied) as memory:
        for step in range(3):
            kept.fill_(1.0 + group.rank())
            if step == 1:
                for index, value in bad.get(group.rank(), {}).items():
                    kept[index] = value
            answers.append(memory.all_reduce(kept, 0, 0.5, watch=True))
            if step == 1:
                places = (~kept.isfinite()).nonzero().flatten().tolist()
    return answers, places, bool((kept == 1.5).all())


@pytest.mark.parametrize("copied", [set(), {0}, {0, 1}], ids=str)
@pytest.mark.parametrize(
    "bad",
    [
        {1: {0: NAN}},
        {0: {LAST: -INF}},
        {0: {7: INF, LAST: NAN}, 1: {8: NAN, 80_000: INF}},
        {0: {100: INF}, 1: {100: -INF}},
        {0: {100: HUGE}, 1: {100: HUGE}},
    ],
    ids=["first", "last", "many", "inf - inf", "overflow"],
)
def test_all_ranks_hear_of_a_sum_that_is_not_finite_and_keep_what_they_brought(
    copied: set[int], bad: dict[int, dict[int, float]]
) -> None:
    for rank, result in enumerate(run_in_threads(reduce_watched, 2, copied, bad)):
        own = [index for index, value in bad.get(rank, {}).items() if value != HUGE]
        assert result == ([True, False, True], own, True)


def reduce_huge(group: dist.ProcessGroup) -> tuple[bool, torch.Tensor]:
    tensor = torch.full((300_000,), HUGE / 4 if group.rank() else -1.0)
    with memory_of(group) as memory:
        return memory.all_reduce(tensor, 0, 0.5, watch=True), tensor


def test_huge_numbers_are_no_false_alarm() -> None:
    for finite, tensor in run_in_threads(reduce_huge, 2):
        assert finite
        assert torch.equal(tensor, torch.full((300_000,), (torch.tensor(HUGE / 4) - 1.0).item() * 0.5))
