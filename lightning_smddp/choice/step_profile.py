"""The memory and time of one training step in one process, from which those of strategies follow.

Gradients are dropped as soon as they are complete: they are counted by themselves, and this process need not hold all
of them. So what is recorded is the rest: what the forward keeps for the backward, and what both need for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch_memory import MemoryRecord, recorded_memory
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.capture.tracer import now

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepProfile:
    """Bytes above what was there before the step, gradients not counted; seconds.

    Attributes:
        kept: when the forward is over: what the backward needs.
        peak: the most at any time.
        seconds: of forward and backward.
        received, sent: bytes that a stage of a pipeline gets from the one before, and sends to the next.
    """

    kept: int
    peak: int
    seconds: float = 0.0
    received: int = 0
    sent: int = 0

    @property
    def temporary(self) -> int:
        """Bytes at the fullest moment beside what is kept."""
        return self.peak - self.kept


def profile_step(loss_of_step: Callable[[], Tensor], root: nn.Module) -> StepProfile:
    """Run a step's forward and backward some times: once to see its memory, then for its time. Nothing of it stays.

    Args:
        loss_of_step: runs the forward and returns the loss.
        root: the module.
    """
    # Recording slows a step down, so it is timed by itself.
    with preserve_state(root, _CPU), dropped_gradients(root):
        with recorded_memory() as record:
            loss = loss_of_step()
            record.mark("backward")
            loss.backward()
            del loss
        seconds = shortest(lambda: loss_of_step().backward())
    return replace(profile_of(record), seconds=seconds)


def shortest(run: Callable[[], object], repeats: int = 2) -> float:
    """Seconds of the fastest of some runs, without the time in which other processes had the processor."""
    seconds = []
    for _ in range(repeats):
        begin = now(_CPU)
        run()
        seconds.append(now(_CPU) - begin)
    return min(seconds)


def profile_of(record: MemoryRecord) -> StepProfile:
    """The profile of a record with the mark ``"backward"``."""
    # Entries are bytes that were allocated (or freed, if negative), in order, with the marks between them.
    now = 0
    kept = 0
    peak = 0
    for entry in record.entries:
        if isinstance(entry, int):
            now += entry
            peak = max(peak, now)
        elif entry == "backward":
            kept = now
    return StepProfile(kept, peak)


@contextmanager
def dropped_gradients(root: nn.Module) -> Iterator[None]:
    """Within it a parameter's gradient is freed when it is complete, as DDP does when it has it in its bucket."""
    handles = []
    for parameter in root.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(_drop))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
