"""How many micro-batches ``num_microbatches="auto"`` takes."""

from __future__ import annotations

import pytest

from lightning_smddp.planner.schedules import auto_num_microbatches


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
