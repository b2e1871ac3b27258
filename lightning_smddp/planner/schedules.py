"""What a pipeline schedule tells each rank to do, with how many micro-batches, and how busy it keeps ranks at best."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")

MOST_PER_RANK = 4  # 4 p micro-batches already keep p ranks more than 80 % busy; more are smaller and less efficient
ENOUGH_PER_RANK = 2


class Action(NamedTuple):
    """One micro-batch through one stage.

    Attributes:
        stage: index of the stage.
        kind: F forward, B whole backward, or its two halves: I gradient of the input, W gradient of the weights.
        microbatch: index of the micro-batch.
    """

    stage: int
    kind: Kind
    microbatch: int


Orders = Mapping[int, Sequence[Action]]  # rank -> what it does, in order


def parse_action(text: str) -> Action:
    """The action that torch spells as ``text``: "2F0" is stage 2, forward, micro-batch 0.

    Raises:
        ValueError: for anything else than a forward or backward of one micro-batch.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no action: expected stage, F, B, I or W, micro-batch, like '2F0'")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]  # the pattern allows a Kind only


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

    def is_allowed(count: int) -> bool:
        return rule is None or rule(count)

    # Downwards from as many as are wanted; only if none of them will do, upwards from there.
    most = min(batch_rows, MOST_PER_RANK * num_ranks)
    allowed = [count for count in range(most, 0, -1) if is_allowed(count)]
    if not allowed:
        allowed = [count for count in range(most + 1, batch_rows + 1) if is_allowed(count)]
    if not allowed:
        raise ValueError(
            f"a batch of {batch_rows} rows cannot be cut into a number of micro-batches that the schedule allows on"
            f" {num_ranks} ranks: use a bigger batch, fewer ranks, or another schedule"
        )
    # The first of these is what there is if no number divides the batch.
    for count in allowed:
        if count >= ENOUGH_PER_RANK * num_ranks and batch_rows % count == 0:
            return count
    return allowed[0]
