"""The memory of one training step in one process, from which that of strategies follows.

Gradients are dropped as soon as they are complete: they are counted by themselves, and this process need not hold all
of them. So what is seen is the rest: what the forward keeps for the backward, and what both need for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch_memory import MemoryRecord, recorded_memory
from lightning_smddp.pipeline.capture.preserve_state import preserve_state

BACKWARD = "backward"  # the forward is over
_CPU = torch.device("cpu")


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
    """Run a step's forward and backward. Nothing of it stays.

    Args:
        loss_of_step: runs the forward and returns the loss.
        root: the module.
    """
    with preserve_state(root, _CPU), dropped_gradients(root), recorded_memory() as record:
        loss = loss_of_step()
        record.settle()
        record.mark(BACKWARD)
        loss.backward()
        del loss
    return profile_of(record)


def profile_of(record: MemoryRecord) -> StepProfile:
    """The profile of a record with the mark :data:`BACKWARD`."""
    now = 0
    kept = 0
    peak = 0
    for entry in record.entries:
        if isinstance(entry, int):
            now += entry
            peak = max(peak, now)
        elif entry == BACKWARD:
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
