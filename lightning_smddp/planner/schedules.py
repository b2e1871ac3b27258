"""What a pipeline schedule tells each rank to do, with how many micro-batches, and how busy it keeps ranks at best."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_SECONDS: dict[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

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


def simulated_bound(orders: Orders) -> float:
    """The share of time in which ranks compute at best: orders played through with equal stages and free messages.

    A backward takes twice a forward, I and W each as long as a forward. A rank does its actions one after another, each
    as soon as what it needs is there.
    """
    actions = set(chain.from_iterable(orders.values()))
    free = dict.fromkeys(orders, 0.0)  # rank -> when it is done with what it has begun
    end: dict[Action, float] = {}  # of the actions played so far, when each is done
    position = dict.fromkeys(orders, 0)  # rank -> the next one in its order
    while len(end) < len(actions):
        # One round: each rank goes on as far as it can with what is done. A round in which none gets any further is a
        # deadlock of the schedule's.
        done = len(end)
        for rank, order in orders.items():
            while position[rank] < len(order):
                action = order[position[rank]]
                needed = _needed(action, actions)
                if any(other not in end for other in needed):
                    break
                start = max([free[rank], *(end[other] for other in needed)])
                end[action] = free[rank] = start + _SECONDS[action.kind]
                position[rank] += 1
        assert len(end) > done, f"the ranks wait for each other: {orders}"
    # Of the time of all ranks, from the step's begin to the end of the last one.
    busy = sum(_SECONDS[action.kind] for action in actions)
    step = max(free.values())
    return busy / (len(orders) * step)


def _needed(action: Action, actions: set[Action]) -> list[Action]:
    """What has to be done before ``action``, on whichever rank; ``actions`` are those of all ranks."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    # The gradient comes from the next stage, whose backward is whole or split; there is none behind the last stage.
    later = {Action(stage + 1, "I", microbatch), Action(stage + 1, "B", microbatch)}
    return [Action(stage, "F", microbatch), *(later & actions)]


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
