"""How many micro-batches to cut a batch into."""

from __future__ import annotations

from collections.abc import Callable

MOST_PER_RANK = 4  # 4 p micro-batches already keep p ranks more than 80 % busy; more are smaller and less efficient
ENOUGH_PER_RANK = 2


def auto_num_microbatches(batch_rows: int, num_ranks: int, rule: Callable[[int], bool] | None = None) -> int:
    """The number of micro-batches for a batch of ``batch_rows`` on a pipeline of ``num_ranks``.

    The largest number up to 4 for each rank that divides the batch, if that is at least 2 for each rank; else the
    largest up to 4 for each rank: micro-batches of unequal size are exact, but wait for each other.

    Args:
        batch_rows: rows in the batch of one replica.
        num_ranks: ranks of one pipeline.
        rule: whether the schedule can do with a number of micro-batches; all are fine by default.

    Raises:
        ValueError: for an empty batch or pipeline, and when the rule allows no number up to ``batch_rows``.
    """
    if batch_rows < 1 or num_ranks < 1:
        raise ValueError(f"batch_rows={batch_rows} and num_ranks={num_ranks} must be at least 1")
    most = min(batch_rows, MOST_PER_RANK * num_ranks)
    allowed = [count for count in range(most, 0, -1) if rule is None or rule(count)]
    if not allowed:
        allowed = [count for count in range(most + 1, batch_rows + 1) if rule is None or rule(count)]
    if not allowed:
        raise ValueError(
            f"a batch of {batch_rows} rows cannot be cut into a number of micro-batches that the schedule allows on"
            f" {num_ranks} ranks: use a bigger batch, fewer ranks, or another schedule"
        )
    even = (count for count in allowed if batch_rows % count == 0 and count >= ENOUGH_PER_RANK * num_ranks)
    return next(even, allowed[0])
