"""The memory of one training step in one process, from which that of strategies follows.

Gradients are dropped as soon as they are complete: they are counted by themselves, and this process need not hold all
of them. So what is seen is the rest: what the forward keeps for the backward, and what both need for a moment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_smddp.communication.tensors import CPU
from lightning_smddp.pipeline.capture.preserve_state import dropped_gradients, preserve_state

T = TypeVar("T")


@dataclass(frozen=True)
class StepProfile:
    """Bytes above what was there before the step, gradients not counted.

    Attributes:
        kept: when the forward is over: what the backward needs.
        peak: the most at any time.
    """

    kept: int
    peak: int

    @property
    def temporary(self) -> int:
        """Bytes at the fullest moment beside what is kept."""
        return self.peak - self.kept


def profile_step(loss_of_step: Callable[[], Tensor], root: nn.Module) -> StepProfile:
    """Run a step's forward, which returns the loss, and its backward. Nothing of it stays.

    Args:
        loss_of_step: the forward.
        root: its module.
    """
    record = MemoryRecord()
    with ExitStack() as stack:
        stack.enter_context(preserve_state(root, CPU))
        stack.enter_context(dropped_gradients(root))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        loss = record.run(loss_of_step)
        kept = record.now
        record.run(loss.backward)
        del loss
    return StepProfile(kept, record.peak)


class MemoryRecord:
    """What torch's CPU allocator gives out and gets back in some runs.

    Attributes:
        now: bytes of what these runs have allocated, and not freed.
        peak: the most that it was.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._blocks: dict[int, int] = {}  # address: bytes

    def run(self, function: Callable[[], T]) -> T:
        """Call it, and count."""
        # The profiler's trace has addresses, which no other public face of it has.
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _without_stderr():
            profiler.start()
        try:
            return function()
        finally:
            with _without_stderr(), tempfile.TemporaryDirectory(prefix="smddp-plan-") as directory:
                profiler.stop()
                path = Path(directory, "trace.json")
                profiler.export_chrome_trace(str(path))
                events = json.loads(path.read_text())["traceEvents"]
            found = [event for event in events if event["name"] == "[memory]"]
            for event in sorted(found, key=itemgetter("ts")):
                self._count(event["args"]["Addr"], event["args"]["Bytes"])

    def _count(self, address: int, size: int) -> None:
        if size > 0:
            self._blocks[address] = size
            self.now += size
            self.peak = max(self.peak, self.now)
        else:  # of what was there before, nothing
            self.now -= self._blocks.pop(address, 0)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Around the profiler's start and stop, of which torch writes from C++, whatever its log level is."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
