"""What gradient communication cost: the clock of one rank's exchange, and the report over all ranks.

On a device the host only launches: its clock tells nothing of the work. There events are recorded on the streams, and
read when they have passed, mostly a step later, so that the host waits for none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.objects import gather
from lightning_smddp.wording import counted


@dataclass
class Totals:
    """Sums over all steps. Times in seconds, of this rank."""

    steps: int = 0
    gradient_bytes: int = 0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class _Step:
    """Of one backward pass: when each bucket came, when the hook returned, when a bucket was reduced."""

    # backward     ======[hook]====[hook]======[hook].....|      = computes, . waits for the last bucket
    # bucket 0           |------------|                   |
    # bucket 1                     |-----------|          |      busy: time under at least one of these lines
    # bucket 2                                 |----------|      blocked: in the hook
    came: list[Any] = field(default_factory=list)
    left: list[Any] = field(default_factory=list)
    done: list[Any] = field(default_factory=list)

    def in_seconds(self) -> _Step:
        """With times in the place of a device's events."""
        first = self.came[0]
        marks = (self.came, self.left, self.done)
        return _Step(*[[first.elapsed_time(event) / 1e3 for event in events] for events in marks])

    def times(self) -> tuple[float, float]:
        """Seconds that backward stood still, and that at least one bucket was in flight."""
        # The length of the union: each span counts from where those before it have ended.
        busy, end = 0.0, self.came[0]
        for began, ended in zip(self.came, sorted(self.done), strict=True):
            if ended > end:
                busy += ended - max(began, end)
                end = ended
        # Backward stood still in the hook, and after the last hook until the last bucket was done. That cannot be more
        # than the time with a bucket in flight, or that in the hook.
        blocked = sum(self.left) - sum(self.came)
        exposed = blocked + max(0.0, end - self.left[-1])
        return min(exposed, max(busy, blocked)), busy


class Recorder:
    """Collects :class:`Totals`; called from the thread of backward and from those that complete buckets.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self.totals = Totals()
        self.last_exposed_s = 0.0
        self._by_events = device.type == "cuda"
        self._now: Callable[[], Any] = _event if self._by_events else time.perf_counter
        self._lock = threading.Lock()
        self._step = _Step()
        self._ended: deque[_Step] = deque()  # whose events have not passed

    def on_wait(self, seconds: float) -> None:
        """This rank waited inside its node. That counts for a bucket, not in what is measured before training."""
        with self._lock:
            if len(self._step.came) > len(self._step.done):
                self.totals.waited_s += seconds

    def bucket_started(self, first: bool) -> None:
        """A bucket came, the ``first`` of this backward pass or a later one. Called on the stream of backward."""
        with self._lock:
            if first:
                self._end_step(wait=False)
                self._step = _Step()  # an exception may have ended the last one
            self._step.came.append(self._now())

    def hook_left(self, gradient_bytes: int) -> None:
        """The hook returned to backward. With a device that the host was in it tells nothing."""
        with self._lock:
            self._step.left.append(self._step.came[-1] if self._by_events else self._now())
            self.totals.gradient_bytes += gradient_bytes

    def bucket_done(self) -> None:
        """A bucket is reduced. Called on a stream that waits for it."""
        with self._lock:
            self._step.done.append(self._now())

    def read(self, wait: bool = False) -> Totals:
        """Totals up to now; with ``wait`` also of what a device has not come to yet."""
        with self._lock:
            self._end_step(wait)
            return self.totals

    def _end_step(self, wait: bool) -> None:
        if len(self._step.came) == len(self._step.done) > 0:
            self._ended.append(self._step)
            self._step = _Step()
        while self._ended:
            if self._by_events and wait:
                for event in self._ended[0].done:
                    event.synchronize()
            if self._by_events and not all(event.query() for event in self._ended[0].done):
                return
            step = self._ended.popleft()
            exposed, busy = (step.in_seconds() if self._by_events else step).times()
            self.totals.steps += 1
            self.totals.exposed_s += exposed
            self.totals.hidden_s += max(0.0, busy - exposed)
            self.last_exposed_s = exposed


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class CommunicationReport:
    """Gradient communication since the start of fit.

    Attributes:
        steps: backward passes with gradient synchronisation, on one rank.
        gradient_bytes: gradients of one rank, over all steps.
        exposed_s: for each rank, how long backward stood still for communication.
        hidden_s: for each rank, how long communication ran while backward did.
        waited_s: for each rank, how long it waited for others.
        straggler: the rank that others waited for; None when nobody waited much.
        straggler_name: with its host.
    """

    steps: int
    gradient_bytes: int
    exposed_s: tuple[float, ...]
    hidden_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    straggler: int | None
    straggler_name: str

    @classmethod
    def collect(cls, recorder: Recorder, communicator: Communicator) -> CommunicationReport:
        """The report of what the ranks have recorded. Collective."""
        totals = recorder.read(wait=True)
        ranks: list[Totals] = gather(totals, communicator.group)
        # Without shared memory nobody sees who comes late; then the exposed time is the wait.
        if any(rank.waited_s for rank in ranks):
            nodes = communicator.topology.nodes
            waited = [rank.waited_s for rank in ranks]
        else:
            nodes = (tuple(range(len(ranks))),)
            waited = [rank.exposed_s for rank in ranks]
        straggler = _straggler(waited, nodes, totals.steps)
        return cls(
            steps=totals.steps,
            gradient_bytes=totals.gradient_bytes,
            exposed_s=tuple([rank.exposed_s for rank in ranks]),
            hidden_s=tuple([rank.hidden_s for rank in ranks]),
            waited_s=tuple(waited),
            straggler=straggler,
            straggler_name="" if straggler is None else communicator.topology.describe(straggler),
        )

    def __str__(self) -> str:
        steps = max(self.steps, 1)
        lines = [
            f"gradient communication over {counted(self.steps, 'step')}",
            f"  gradients             {_size(self.gradient_bytes / steps)} a step on each rank",
        ]
        times = {"exposed": self.exposed_s, "hidden by backward": self.hidden_s, "waited for others": self.waited_s}
        for name, seconds in times.items():
            if any(seconds):  # shared memory hides nothing
                by_rank = ", ".join(f"{1000 * value / steps:.2f}" for value in seconds)
                lines.append(f"  {name:<22}{by_rank} ms a step, by rank")
        if self.straggler is not None:
            lines.append(f"  others waited most for {self.straggler_name}")
        return "\n".join(lines)


def _straggler(waited: list[float], nodes: Sequence[Sequence[int]], steps: int) -> int | None:
    """The rank that waited least where another one waited longest, if that was 1 ms a step at least.

    Args:
        waited: seconds of each rank.
        nodes: groups of ranks that waited for each other.
        steps: that all of this was in.
    """
    most = max(waited)
    longest = waited.index(most)
    ranks = next(ranks for ranks in nodes if longest in ranks)
    least = min(ranks, key=waited.__getitem__)
    if most < 1e-3 * max(steps, 1) or waited[least] > 0.5 * most:  # hardly anybody waits; all do, for each other
        return None
    return least


def _size(value: float) -> str:
    return f"{value / 2**10:.1f} KiB" if value < 2**20 else f"{value / 2**20:.2f} MiB"
