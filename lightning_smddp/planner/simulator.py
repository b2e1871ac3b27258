"""A training step of a pipeline played through on paper: when each rank is done, from what its actions take."""

from __future__ import annotations

import re
from collections import defaultdict
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


def parsed(orders: Mapping[int, Sequence[str]]) -> dict[int, list[Action]]:
    """Orders whose actions are spelled as torch does it: "2F0" is stage 2, forward, micro-batch 0."""
    return {rank: [_parsed(text) for text in texts] for rank, texts in orders.items()}


def _parsed(text: str) -> Action:
    stage, kind, microbatch = re.split("([FBIW])", text)
    return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]  # the pattern has Kinds only


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
    free = dict.fromkeys(orders, 0.0)  # rank -> when it is done with what it has begun
    position = dict.fromkeys(orders, 0)  # rank -> the next one in its order
    end: dict[Action, float] = {}  # of the actions played so far
    waiting: dict[Action, list[int]] = defaultdict(list)  # what ranks cannot go on without
    ready = list(orders)
    while ready:
        rank = ready.pop()
        # It goes on as far as it can, and hands on those that have waited for what it does.
        while position[rank] < len(orders[rank]):
            action = orders[rank][position[rank]]
            needed = _needed(action, rank_of)
            missing = next((other for other in needed if other not in end), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            start = free[rank]
            for other in needed:
                arrived = end[other] if rank_of[other] == rank else end[other] + message_s
                start = max(start, arrived)
            end[action] = free[rank] = start + seconds[action.kind]
            position[rank] += 1
            ready += waiting.pop(action, ())
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
