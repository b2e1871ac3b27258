"""How long a pipeline schedule takes, before it is run: orders of actions played through with given costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_smddp.planner.actions import Action, OrderError, Orders, inputs_in
from lightning_smddp.planner.spans import Span, SpanKind, bubble_fraction, busy_share, step_seconds

SPAN_KINDS: dict[str, SpanKind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        spans: what every rank does when, from second 0.
        step_s: seconds until the last rank is done.
        busy_share: for each rank, the share of the step in which it computes.
        bubble_fraction: the share of all ranks' time in which nothing is computed.
    """

    spans: list[Span]
    step_s: float
    busy_share: dict[int, float]
    bubble_fraction: float


def simulate(
    orders: Orders,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float] | None = None,
    *,
    input_share: float = 0.5,
) -> Simulation:
    """Play ``orders`` through.

    A rank does its actions one after another, each as soon as its inputs are there. Sending starts when a value is
    ready and does not keep the rank from computing; the messages from one rank to another queue up.

    Args:
        orders: rank -> actions, in order.
        forward_s: seconds of a forward, for each stage.
        backward_s: seconds of a whole backward, for each stage.
        send_s: seconds of a message between stages i and i + 1, each way, for each boundary; none by default.
            Between stages of one rank nothing is sent.
        input_share: how much of a whole backward its I is; W is the rest.

    Raises:
        OrderError: when the ranks wait for each other for ever.
        ValueError: when there are not as many costs as stages.
    """
    num_stages = 1 + max((action.stage for order in orders.values() for action in order), default=-1)
    sends = [0.0] * (num_stages - 1) if send_s is None else send_s
    if len(forward_s) != num_stages or len(backward_s) != num_stages or len(sends) < num_stages - 1:
        raise ValueError(
            f"{num_stages} stages need as many forward_s and backward_s, and one send_s less; got {len(forward_s)},"
            f" {len(backward_s)} and {len(sends)}"
        )
    cost = {
        "F": forward_s,
        "B": backward_s,
        "I": [seconds * input_share for seconds in backward_s],
        "W": [seconds * (1 - input_share) for seconds in backward_s],
    }
    spans = _Player(orders, cost, sends).play()
    return Simulation(spans, step_seconds(spans), busy_share(spans), bubble_fraction(spans))


class _Player:
    """The clock of every rank and link while orders are played through."""

    def __init__(self, orders: Orders, cost: dict[str, Sequence[float]], send_s: Sequence[float]) -> None:
        self.orders, self.cost, self.send_s = orders, cost, send_s
        self.inputs = inputs_in(orders)
        self.rank_of = {action.stage: rank for rank, order in orders.items() for action in order}
        self.free = dict.fromkeys(orders, 0.0)  # rank -> when it is done with what it has begun
        self.link_free: dict[tuple[int, int], float] = {}
        self.end: dict[Action, float] = {}
        self.arrival: dict[Action, float] = {}  # when an action's result is at the next or previous stage
        self.spans: list[Span] = []

    def play(self) -> list[Span]:
        """All spans, by start."""
        position = dict.fromkeys(self.orders, 0)
        while remaining := {
            rank: order[position[rank]] for rank, order in self.orders.items() if position[rank] < len(order)
        }:
            ready = {rank: self._start(action, rank) for rank, action in remaining.items() if self._is_ready(action)}
            if not ready:
                waiting = ", ".join(f"rank {rank} with {action}" for rank, action in remaining.items())
                raise OrderError(f"the order cannot run to its end; waiting: {waiting}")
            # The earliest first, so that messages enter a link in the order in which they are ready.
            rank = min(ready, key=lambda each: (ready[each] + self._seconds(remaining[each]), each))
            self._do(remaining[rank], rank, ready[rank])
            position[rank] += 1
        return sorted(self.spans, key=lambda span: (span.start_s, span.rank, span.end_s))

    def _seconds(self, action: Action) -> float:
        return self.cost[action.kind][action.stage]

    def _is_ready(self, action: Action) -> bool:
        return all(needed in self.end for needed in self.inputs[action])

    def _start(self, action: Action, rank: int) -> float:
        """When all inputs of ``action`` are on ``rank``, and the rank is free."""
        arrivals = [
            self.end[needed] if needed.stage == action.stage else self.arrival[needed] for needed in self.inputs[action]
        ]
        return max([self.free[rank], *arrivals])

    def _do(self, action: Action, rank: int, start: float) -> None:
        stage, kind, microbatch = action
        if start > self.free[rank]:
            self.spans.append(Span(rank, stage, "wait", microbatch, self.free[rank], start))
        end = start + self._seconds(action)
        self.spans.append(Span(rank, stage, SPAN_KINDS[kind], microbatch, start, end))
        self.free[rank] = self.end[action] = self.arrival[action] = end
        receiver = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and receiver in self.rank_of and self.rank_of[receiver] != rank:
            self._send(action, rank, self.rank_of[receiver], self.send_s[min(stage, receiver)])

    def _send(self, action: Action, rank: int, to: int, seconds: float) -> None:
        start = max(self.end[action], self.link_free.get((rank, to), 0.0))
        self.arrival[action] = self.link_free[rank, to] = start + seconds
        if seconds > 0:
            self.spans.append(Span(rank, action.stage, "send", action.microbatch, start, start + seconds))
