"""When a rank did what: spans of time for a timeline."""

from __future__ import annotations

import time
from typing import Any

import torch

from lightning_smddp.planner.timeline import Span, SpanKind


class SpanRecorder:
    """Collects the spans of an engine's steps, in seconds since this was made.

    ``wait`` is idle time until the action of that stage and micro-batch could start, on messages from other ranks and
    on their readiness to take ours. ``send`` is the time after a rank's last action until its messages were taken.

    On CUDA the times are those of the device's current stream, from events; a recorded step then synchronises the
    device when it starts and when it ends.

    Args:
        rank: Written into each span.
        device: Where the stages compute.

    Attributes:
        spans: of all steps, in order of time.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._on_cuda = device.type == "cuda"
        self.spans: list[Span] = []
        self._actions: list[tuple[int, SpanKind, int, Any, Any]] = []
        self._start: Any = None
        self._start_seconds = 0.0
        self._origin = time.perf_counter()

    def begin_step(self) -> None:
        """Forget an unfinished step; the time until the first action counts as waiting for it."""
        self._actions.clear()
        if self._on_cuda:
            torch.cuda.synchronize(self.device)
        self._start = self.now()
        self._start_seconds = time.perf_counter() - self._origin

    def now(self) -> Any:
        """This moment: seconds, or an event on CUDA."""
        if not self._on_cuda:
            return time.perf_counter() - self._origin
        # The host's clock would tell when work was launched, not when the device did it.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, stage: int, kind: SpanKind, microbatch: int, start: Any) -> None:
        """What has been done from ``start``, a :meth:`now`, until now."""
        self._actions.append((stage, kind, microbatch, start, self.now()))

    def end_step(self) -> None:
        """Turn the actions into spans, and the gaps between them too."""
        finish = self.now()
        if self._on_cuda:
            torch.cuda.synchronize(self.device)
        # Spans fill the step without a gap:
        #     wait | forward | wait | forward | ... | wait | backward | send
        before = self._start_seconds
        for stage, kind, microbatch, *marks in self._actions:
            start, end = map(self._seconds, marks)
            self.spans.append(Span(self.rank, stage, "wait", microbatch, before, start))
            self.spans.append(Span(self.rank, stage, kind, microbatch, start, end))
            before = end
        if self._actions:
            self.spans.append(Span(self.rank, stage, "send", microbatch, before, self._seconds(finish)))
        self._actions.clear()

    def _seconds(self, mark: Any) -> float:
        if not self._on_cuda:
            return float(mark)
        return self._start_seconds + float(self._start.elapsed_time(mark)) / 1e3
