"""What a pipeline schedule tells a rank to do, as text and as checked plain data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


class OrderError(ValueError):
    """An order of actions that is incomplete, contradictory or cannot run."""


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

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Orders = Mapping[int, Sequence[Action]]  # rank -> what it does, in order


def parse_action(text: str) -> Action:
    """The action that torch spells as ``text``: "2F0" is stage 2, forward, micro-batch 0.

    Raises:
        OrderError: for anything else than a forward or backward of one micro-batch.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise OrderError(f"{text!r} is no action: expected stage, F, B, I or W, micro-batch, like '2F0'")
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]  # the pattern allows a Kind only


def parse_actions(text: str) -> list[Action]:
    """All actions in one cell of torch's schedules: none for an idle one, two for "(0F1;2B0)OVERLAP_F_B"."""
    text = text.strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    parts = overlapped[1].split(";") if overlapped else [text]
    return [parse_action(part) for part in parts if part]


def inputs_of(action: Action, num_stages: int, *, split_backward: bool) -> list[Action]:
    """What must be done before ``action``, on whichever rank.

    ``split_backward``: whether the next stage makes the gradient of its input by I instead of B.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    before = [Action(stage, "F", microbatch)]
    if stage + 1 < num_stages:
        before.append(Action(stage + 1, "I" if split_backward else "B", microbatch))
    return before


def inputs_in(orders: Orders) -> dict[Action, list[Action]]:
    """For every action of ``orders``, what must be done before it."""
    actions = {action for order in orders.values() for action in order}
    num_stages = 1 + max((action.stage for action in actions), default=-1)
    return {
        action: inputs_of(
            action, num_stages, split_backward=Action(action.stage + 1, "I", action.microbatch) in actions
        )
        for action in actions
    }


def check_order(orders: Orders, num_stages: int, num_microbatches: int, *, forward_only: bool = False) -> None:
    """Check that every micro-batch goes forward and backward through every stage once, and that all of it can run.

    Backward is B, or I and W. Every stage must stay on one rank.

    Raises:
        OrderError: with the actions that are missing, repeated or unknown, or where every rank is stuck.
    """
    counts = Counter(action for order in orders.values() for action in order)
    if repeated := [str(action) for action, count in counts.items() if count > 1]:
        raise OrderError(f"scheduled more than once: {_listed(repeated)}")
    expected = {
        action
        for stage in range(num_stages)
        for microbatch in range(num_microbatches)
        for action in _of_microbatch(stage, microbatch, counts, forward_only)
    }
    if missing := [str(action) for action in sorted(expected - counts.keys())]:
        raise OrderError(f"{num_stages} stages and {num_microbatches} micro-batches also need {_listed(missing)}")
    if surplus := [str(action) for action in sorted(counts.keys() - expected)]:
        raise OrderError(
            f"{num_stages} stages and {num_microbatches} micro-batches have no place for {_listed(surplus)}"
        )
    rank_of = {action.stage: rank for rank, order in orders.items() for action in order}
    for rank, order in orders.items():
        for action in order:
            if rank_of[action.stage] != rank:
                raise OrderError(f"stage {action.stage} is on rank {rank} and on rank {rank_of[action.stage]}")
    _check_progress(orders)


def _of_microbatch(stage: int, microbatch: int, counts: Mapping[Action, int], forward_only: bool) -> list[Action]:
    kinds: Sequence[Kind] = ("F",) if forward_only else ("F", "B")
    if not forward_only and Action(stage, "B", microbatch) not in counts:
        halves = [Action(stage, half, microbatch) in counts for half in ("I", "W")]
        kinds = ("F", "I", "W") if any(halves) else kinds
    return [Action(stage, kind, microbatch) for kind in kinds]


def _check_progress(orders: Orders) -> None:
    inputs = inputs_in(orders)
    done: set[Action] = set()
    position = dict.fromkeys(orders, 0)
    progressing = True
    while progressing:
        progressing = False
        for rank, order in orders.items():
            while position[rank] < len(order) and done.issuperset(inputs[order[position[rank]]]):
                done.add(order[position[rank]])
                position[rank] += 1
                progressing = True
    stuck = []
    for rank, order in orders.items():
        if position[rank] < len(order):
            action = order[position[rank]]
            awaited = [str(needed) for needed in inputs[action] if needed not in done]
            stuck.append(f"rank {rank} waits with {action} for {' and '.join(awaited)}")
    if stuck:
        raise OrderError(f"the order cannot run to its end: {'; '.join(stuck)}")


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
