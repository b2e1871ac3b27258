"""A training step of a pipeline played through on paper: when each rank is done, from what its actions take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["F", "B", "I", "W"]

EQUAL: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""What actions take with equal stages: a backward twice a forward, each of its halves as long as a forward."""


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


Orders: TypeAlias = Mapping[int, Sequence[Action]]
"""What each rank does, in order."""


@dataclass(frozen=True)
class SimulatedStep:
    """Times of a step, in the unit of what was given.

    Attributes:
        seconds: from its begin until the last rank is done.
        busy_share: of the time of all ranks, how much they compute; the rest is the bubble.
    """

    seconds: float
    busy_share: float


def simulate(orders: Orders, seconds: Mapping[Kind, float] = EQUAL, message_s: float = 0.0) -> SimulatedStep:
    """Play a step through. A rank does its actions one after another, each as soon as what it needs is there.

    Args:
        orders: what each rank does; all stages take the same.
        seconds: what each kind of action takes.
        message_s: from the end of an action until another rank has its result. No rank is kept busy by it.

    Raises:
        ValueError: the ranks wait for each other.
    """
    rank_of = {action: rank for rank, order in orders.items() for action in order}
    waiting = {rank: deque(order) for rank, order in orders.items()}  # what it has not begun
    free = dict.fromkeys(orders, 0.0)  # rank -> when it is done with what it has begun
    end: dict[Action, float] = {}  # of the actions played so far
    played = -1
    while len(end) > played:  # each rank goes on as far as it can, in turn
        played = len(end)
        for rank, order in waiting.items():
            while order and all(other in end for other in _needed(order[0], rank_of)):
                action = order.popleft()
                arrived = [end[other] + message_s * (rank_of[other] != rank) for other in _needed(action, rank_of)]
                end[action] = free[rank] = max(free[rank], *arrived, 0.0) + seconds[action.kind]
    if len(end) < len(rank_of):
        raise ValueError(f"the ranks wait for each other: {orders}")
    step = max(free.values())
    busy = sum(seconds[action.kind] for action in rank_of)
    return SimulatedStep(step, busy / (len(orders) * step))


def _needed(action: Action, actions: Mapping[Action, int]) -> list[Action]:
    """What has to be done before ``action``, on whichever rank; ``actions`` are those of all ranks."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    # The gradient comes from the next stage, whose backward is whole or split; there is none behind the last stage.
    later = [Action(stage + 1, "I", microbatch), Action(stage + 1, "B", microbatch)]
    return [Action(stage, "F", microbatch), *(other for other in later if other in actions)]
