"""Clock of the gradient exchange: when buckets came, when they were done, who was waited for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class StepStats:
    """One backward pass with gradient synchronisation."""

    started: float = 0.0
    blocked_s: float = 0.0  # backward stood still in the hook
    hook_left: float = 0.0  # when the hook returned last
    done: float = 0.0  # when the last bucket was reduced
    busy_s: float = 0.0  # at least one bucket was in flight
    in_flight_since: float = 0.0
    in_flight: int = 0


@dataclass
class Totals:
    """Sums over all steps. Times in seconds, of this rank."""

    steps: int = 0
    buckets: int = 0
    gradient_bytes: int = 0
    intra_node_bytes: int = 0
    inter_node_bytes: int = 0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    waited_s: float = 0.0
    waited_for: Counter[int] = field(default_factory=Counter)


class Recorder:
    """Collects :class:`Totals`; called from the thread of backward and from those that complete buckets."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.step = StepStats()
        self.last_exposed_s = 0.0
        self._lock = threading.Lock()

    def on_wait(self, seconds: float, last: int | None) -> None:
        """This rank waited inside its node, and came on when rank ``last`` had arrived."""
        with self._lock:
            self.totals.waited_s += seconds
            if last is not None:
                self.totals.waited_for[last] += 1

    def bucket_started(self, first: bool) -> float:
        """A bucket came; ``first`` of this backward pass. Returns the time, for :meth:`hook_left`."""
        now = time.perf_counter()
        with self._lock:
            if first:
                self._close_step()
                self.step = StepStats(started=now, in_flight_since=now)
            if self.step.in_flight == 0:
                self.step.in_flight_since = now
            self.step.in_flight += 1
        return now

    def hook_left(self, entered: float, gradient_bytes: int, intra_bytes: int, inter_bytes: int) -> None:
        """The hook returned to backward."""
        now = time.perf_counter()
        with self._lock:
            self.step.blocked_s += now - entered
            self.step.hook_left = now
            self.totals.buckets += 1
            self.totals.gradient_bytes += gradient_bytes
            self.totals.intra_node_bytes += intra_bytes
            self.totals.inter_node_bytes += inter_bytes

    def bucket_done(self) -> None:
        """A bucket is reduced."""
        now = time.perf_counter()
        with self._lock:
            self.step.in_flight -= 1
            self.step.done = now
            if self.step.in_flight == 0:
                self.step.busy_s += now - self.step.in_flight_since

    def read(self) -> Totals:
        """Totals up to now."""
        with self._lock:
            self._close_step()
            return self.totals

    def _close_step(self) -> None:
        step = self.step
        if not step.started or step.in_flight:
            return
        # Backward stood still in the hook, and after the last hook until the last bucket was done.
        exposed = step.blocked_s + max(0.0, step.done - step.hook_left)
        exposed = min(exposed, max(step.busy_s, step.blocked_s))
        self.totals.steps += 1
        self.totals.exposed_s += exposed
        self.totals.hidden_s += max(0.0, step.busy_s - exposed)
        self.last_exposed_s = exposed
        self.step = StepStats()
