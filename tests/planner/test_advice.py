"""Which advice is given, and the number of micro-batches that is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_smddp.planner.advice import Setting, advice
from lightning_smddp.planner.problem import NodeCost
from lightning_smddp.planner.schedules import auto_num_microbatches


def units(*seconds: float) -> list[NodeCost]:
    return [NodeCost(f"net.{index}", value / 3, 2 * value / 3, 0) for index, value in enumerate(seconds)]


EVEN = Setting(
    nodes=units(1, 1, 1, 1),
    stage_seconds=[1, 1, 1, 1],
    num_microbatches=16,
    num_ranks=4,
    batch_rows=64,
    is_split_given=False,
    rule=lambda count: True,
    bound=lambda count: count / (count + 3),
)


def test_nothing_to_say() -> None:
    assert advice(EVEN) is None
    assert advice(replace(EVEN, num_ranks=1, stage_seconds=[4], num_microbatches=1)) is None


@pytest.mark.parametrize(
    ("items", "cure"),
    [
        (units(1, 1, 1.2, 1.9, 1), "smaller modules, or use pipeline_parallel_size=3"),
        (units(1, 9, 1, 1), "smaller modules"),
    ],
)
def test_a_unit_that_no_cut_can_balance(items: list[NodeCost], cure: str) -> None:
    line = advice(replace(EVEN, nodes=items, num_microbatches=2))
    assert line is not None
    share = max(item.forward_s + item.backward_s for item in items) / sum(i.forward_s + i.backward_s for i in items)
    assert f"takes {share:.0%} of the step alone, where an even share of 4 ranks is 25%: no cut can balance it" in line
    assert line.endswith(cure)


def test_an_uneven_split_of_the_users_own() -> None:
    setting = replace(EVEN, nodes=units(*[1] * 8), stage_seconds=[4, 2, 1, 1], is_split_given=True, num_microbatches=2)
    assert (
        advice(setting)
        == "stage 0 takes 2.0 times the mean stage with the given split: leave out split to have the cuts chosen"
    )


def test_more_micro_batches() -> None:
    expected = "more micro-batches: num_microbatches=16 raises the bound from 73% to 84%"
    assert advice(replace(EVEN, num_microbatches=8)) == expected
    assert advice(replace(EVEN, num_microbatches=8, rule=lambda count: count <= 8)) is None
    assert advice(replace(EVEN, num_microbatches=8, rule=lambda count: False)) is None


@pytest.mark.parametrize(
    ("rows", "ranks", "count"),
    [
        (64, 4, 16),
        (60, 4, 15),
        (8, 4, 8),
        (34, 4, 16),  # 2 is its only divisor up to 16 but 1
        (13, 4, 13),
        (1, 1, 1),
        (64, 1, 4),
    ],
)
def test_auto_num_microbatches(rows: int, ranks: int, count: int) -> None:
    assert auto_num_microbatches(rows, ranks) == count


def test_auto_num_microbatches_keeps_the_schedules_rule() -> None:
    assert auto_num_microbatches(64, 4, lambda count: count % 3 == 0) == 15
    assert auto_num_microbatches(60, 4, lambda count: count % 4 == 0) == 12
    assert auto_num_microbatches(13, 2, lambda count: count in (10, 11)) == 10  # more than 4 a rank if it must be


def test_a_batch_too_small_for_the_rule() -> None:
    with pytest.raises(ValueError, match=r"a batch of 3 rows .* on 4 ranks: use a bigger batch"):
        auto_num_microbatches(3, 4, lambda count: count >= 4)


@pytest.mark.parametrize(("rows", "ranks"), [(0, 4), (4, 0)])
def test_nothing_to_cut(rows: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"batch_rows={rows} and num_ranks={ranks}"):
        auto_num_microbatches(rows, ranks)
