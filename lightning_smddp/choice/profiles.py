"""The memory of one training step in one process, and of a step of its optimizer: that of strategies follows from it.

An optimizer is tried on one parameter of each kind. In the training step gradients are dropped as soon as they are
complete: they are counted by themselves, and this process need not hold all of them. So what is seen is the rest: what
the forward keeps for the backward, and what both need for a moment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from lightning_smddp.choice.first_batch import UnplannableError
from lightning_smddp.communication.tensors import CPU
from lightning_smddp.pipeline.capture.preserve_state import dropped_gradients, preserve_state
from lightning_smddp.pytree import tensors
from lightning_smddp.sharding.optimizer_trial import copy_with

T = TypeVar("T")

_LARGE = 2**20  # bytes: smaller blocks are not looked at page by page
_PAGE = os.sysconf("SC_PAGE_SIZE")


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
    with preserve_state(root, CPU), dropped_gradients(root), torch.compiler.set_stance("force_eager"):
        loss = record.run(loss_of_step)
        kept = record.now
        record.run(loss.backward)
        del loss
    return StepProfile(kept, record.peak)


class MemoryRecord:
    """What torch's CPU allocator gives out and gets back in some runs, as far as it takes memory.

    A block whose pages nobody has written takes none: of oneDNN's workspace for an LSTM the forward writes a third. So
    at the end of a run large blocks that are there count, from their start on, by the pages that were written.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []  # in the order of time: bytes allocated, negative where they were freed
        self._blocks: dict[int, int] = {}  # address: index in `_sizes`, of what is there now

    @property
    def now(self) -> int:
        """Bytes of what these runs have allocated, and not freed."""
        return sum(self._sizes)

    @property
    def peak(self) -> int:
        """The most that it was."""
        return max(accumulate(self._sizes, initial=0))

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
            for address, index in self._blocks.items():
                if self._sizes[index] >= _LARGE:
                    self._sizes[index] -= _unwritten(address, self._sizes[index])

    def _count(self, address: int, size: int) -> None:
        if size > 0:
            self._blocks[address] = len(self._sizes)
            self._sizes.append(size)
        elif address in self._blocks:  # of what was there before, nothing
            self._sizes.append(-self._sizes[self._blocks.pop(address)])


def _unwritten(address: int, size: int) -> int:
    """Bytes of whole pages of a block that have no memory yet; 0 where the system does not tell."""
    # The pages that are the block's alone: the first one begins at or behind its address, the last one ends in it.
    first = (address + _PAGE - 1) // _PAGE
    behind = (address + size) // _PAGE
    upper_bytes = b""
    with suppress(OSError), open("/proc/self/pagemap", "rb") as pages:
        # The file has 64 bits for each page, little-endian. The two upper ones, those of the eighth byte, say that the
        # page is in memory, or swapped.
        pages.seek(8 * first)
        upper_bytes = pages.read(8 * (behind - first))[7::8]
    return _PAGE * sum(byte < 2**6 for byte in upper_bytes)


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


# ---- the optimizer --------------------------------------------------------------------------------------------------


def profile_optimizer(optimizer: Optimizer) -> tuple[dict[int, int], int]:
    """Step copies of the optimizer on one parameter of each shape, with gradients of zero. Nothing of it changes.

    Returns:
        Bytes that it keeps, by parameter's id, and bytes that a step needs for a moment.

    Raises:
        UnplannableError: a copy cannot step one parameter.
    """
    state: dict[int, int] = {}
    tried: dict[tuple[int, torch.Size, torch.dtype], tuple[int, int]] = {}  # by group, shape and type
    peak = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            kind = (number, parameter.shape, parameter.dtype)
            if kind not in tried:
                try:
                    tried[kind] = _try(optimizer, number, parameter)
                except Exception as error:  # whatever a user's optimizer raises
                    name = type(optimizer).__name__
                    cure = "Its memory can be measured with one process."
                    raise UnplannableError(f"{name} cannot be tried on one parameter: {error!r}. {cure}") from error
            state[id(parameter)], temporary = tried[kind]
            # With `foreach` a step has the results of all parameters at once.
            peak = peak + temporary if group.get("foreach") else max(peak, temporary)
    return state, peak


def _try(optimizer: Optimizer, number: int, like: Tensor) -> tuple[int, int]:
    """Bytes that a copy of ``optimizer`` keeps, and needs in a step, for a parameter like one in its group."""
    parameter = nn.Parameter(torch.zeros_like(like))
    parameter.grad = torch.zeros_like(parameter)
    nothing = nn.Parameter(torch.empty(0))
    stand_ins = {id(other): nothing for group in optimizer.param_groups for other in group["params"]}
    trial = copy_with(optimizer, {**stand_ins, id(like): parameter})
    for index, group in enumerate(trial.param_groups):
        group["params"] = [parameter] if index == number else []
    step = type(trial).step  # an instance's own may be a scheduler's
    # The first step makes the state: what later ones need for a moment is seen in the second.
    step(trial)
    record = MemoryRecord()
    record.run(lambda: step(trial))
    # By address: what several entries share counts once.
    sizes = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(trial.state[parameter])}
    return sum(sizes.values()), record.peak
