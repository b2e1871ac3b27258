"""Clock of the gradient exchange: when buckets came, when they were done, who was waited for.

On a device the host only launches: its clock tells nothing of the work. There events are recorded on the streams, and
read when they have passed, mostly a step later, so that the host waits for none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import torch


@dataclass
class StepStats:
    """One backward pass with gradient synchronisation."""

    # backward     ======[hook]====[hook]======[hook].....|      = computes, . waits for the last bucket
    # bucket 0           |------------|                   |
    # bucket 1                     |-----------|          |      busy: time under at least one of these lines
    # bucket 2                                 |----------|      blocked: in the hook
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
    gradient_bytes: int = 0
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

    def hook_left(self, entered: float, gradient_bytes: int) -> None:
        """The hook returned to backward."""
        now = time.perf_counter()
        with self._lock:
            self.step.blocked_s += now - entered
            self.step.hook_left = now
            self.totals.gradient_bytes += gradient_bytes

    def bucket_done(self) -> None:
        """Note that a bucket is reduced; the time without any bucket in flight is not counted as busy."""
        now = time.perf_counter()
        with self._lock:
            self.step.in_flight -= 1
            self.step.done = now
            if self.step.in_flight == 0:
                self.step.busy_s += now - self.step.in_flight_since

    def read(self, wait: bool = False) -> Totals:
        """Totals up to now; with ``wait`` also of what a device has not come to yet."""
        with self._lock:
            self._close_step()
            return self.totals

    def _close_step(self) -> None:
        step = self.step
        if not step.started or step.in_flight:
            return
        # Backward stood still in the hook, and after the last hook until the last bucket was done. That cannot be more
        # than the time with a bucket in flight, or that in the hook.
        exposed = step.blocked_s + max(0.0, step.done - step.hook_left)
        exposed = min(exposed, max(step.busy_s, step.blocked_s))
        self._add(exposed, step.busy_s)
        self.step = StepStats()

    def _add(self, exposed: float, busy: float) -> None:
        self.totals.steps += 1
        self.totals.exposed_s += exposed
        self.totals.hidden_s += max(0.0, busy - exposed)
        self.last_exposed_s = exposed


@dataclass
class DeviceStep:
    """Events of one backward pass: when each bucket came, on backward's stream, and when it was reduced."""

    came: list[torch.cuda.Event] = field(default_factory=list)
    done: list[torch.cuda.Event] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether each bucket has both events."""
        return len(self.came) == len(self.done) > 0

    def has_passed(self) -> bool:
        """Whether the device has come to the end of it. Does not wait."""
        return all(event.query() for event in self.done)

    def times(self) -> tuple[float, float]:
        """Seconds that backward stood still at its end, and that at least one bucket was in flight."""
        # Seconds since the first bucket came; torch counts in milliseconds.
        first = self.came[0]
        spans = []
        for came, done in zip(self.came, self.done, strict=True):
            spans.append((first.elapsed_time(came) / 1e3, first.elapsed_time(done) / 1e3))
        backward_ended, _ = spans[-1]  # when the last bucket came
        # The length of the spans' union: each one counts from where those before it have ended.
        busy, end = 0.0, 0.0
        for began, ended in sorted(spans):
            busy += max(0.0, ended - max(began, end))
            end = max(end, ended)
        return max(0.0, end - backward_ended), busy


class DeviceRecorder(Recorder):
    """A :class:`Recorder` for gradients on a CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self._running = DeviceStep()
        self._pending: deque[DeviceStep] = deque()

    def bucket_started(self, first: bool) -> float:
        """See :class:`Recorder`. Called on the stream of backward."""
        with self._lock:
            if first:
                self._end_step()
                self._take_passed()
            self._running.came.append(_event())
        return 0.0

    def hook_left(self, entered: float, gradient_bytes: int) -> None:
        """See :class:`Recorder`. That the host was in the hook tells nothing."""
        with self._lock:
            self.totals.gradient_bytes += gradient_bytes

    def bucket_done(self) -> None:
        """See :class:`Recorder`. Called on a stream that waits for the bucket."""
        with self._lock:
            self._running.done.append(_event())

    def read(self, wait: bool = False) -> Totals:
        """See :class:`Recorder`."""
        with self._lock:
            self._end_step()
            if wait and self._pending:
                for event in self._pending[-1].done:
                    event.synchronize()
            self._take_passed()
            return self.totals

    def _end_step(self) -> None:
        if self._running.is_whole:  # else an exception has ended it
            self._pending.append(self._running)
        self._running = DeviceStep()

    def _take_passed(self) -> None:
        while self._pending and self._pending[0].has_passed():
            exposed, busy = self._pending.popleft().times()
            self._add(exposed, busy)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def recorder_for(device: torch.device) -> Recorder:
    """A recorder of gradients on ``device``."""
    if device.type == "cuda":
        return DeviceRecorder()
    return Recorder()
