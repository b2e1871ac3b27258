"""The memory of one training step in one process, from which that of strategies follows.

Gradients are dropped as soon as they are complete: they are counted by themselves, and this process need not hold all
of them. So what is seen is the rest: what the forward keeps for the backward, and what both need for a moment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_smddp.communication.tensors import CPU
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.capture.preserve_state import dropped_gradients, preserve_state
from lightning_smddp.pytree import tensors
from lightning_smddp.seeding import Forward, forward_patches

_BACKWARD = "backward"  # the forward is over
_MARK = "lightning_smddp: "
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


def profile_step(
    loss_of_step: Callable[[], Tensor], root: nn.Module, begins: Sequence[tuple[str, int]] = ()
) -> list[StepProfile]:
    """Run a step's forward, which returns the loss, and its backward. Nothing of it stays.

    Args:
        loss_of_step: the forward.
        root: its module.
        begins: for each pipeline stage but the first the module that it begins with, and which of the module's calls
            that is, from 0.

    Returns:
        The profile of each stage.
    """
    calls: Counter[str] = Counter()

    def counted(name: str, forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            for stage, begin in enumerate(begins, start=1):
                if begin == (name, calls[name]):
                    record.mark(f"forward {stage}")
                    # When the backward comes to what a stage begins with, the stage before goes on.
                    for tensor in tensors((args, kwargs)):
                        if tensor.grad_fn is not None:
                            tensor.register_hook(lambda gradient, before=stage - 1: record.mark(f"backward {before}"))
            calls[name] += 1
            return forward(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(preserve_state(root, CPU))
        stack.enter_context(dropped_gradients(root))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(patched(forward_patches(root, counted, {name for name, _ in begins})))
        record = stack.enter_context(recorded_memory())
        loss = loss_of_step()
        record.settle()
        record.mark(_BACKWARD)
        loss.backward()
        del loss
    return _profiles(record.entries, len(begins) + 1)


def _profiles(entries: Sequence[Any], num_stages: int) -> list[StepProfile]:
    """What each stage keeps, and its peak without what others keep."""
    held = [0]  # bytes that all stages before each one keep
    peaks = [0] * num_stages
    now = stage = 0
    for entry in entries:
        if isinstance(entry, int):
            now += entry
            peaks[stage] = max(peaks[stage], now)
            continue
        kind, _, number = entry.partition(" ")
        if kind == "forward" or entry == _BACKWARD:
            held.append(now)
        if number:
            stage = int(number)
    profiles = []
    for (before, behind), peak in zip(pairwise(held), peaks, strict=True):
        kept = behind - before
        profiles.append(StepProfile(kept, max(kept, peak - before)))
    return profiles


class MemoryRecord:
    """What torch's CPU allocator gives out and gets back, as far as it takes memory.

    A block whose pages nobody has written takes none: of oneDNN's workspace for an LSTM the forward pass writes a
    third. See :meth:`settle`.

    Attributes:
        entries: marks, and bytes: of what was allocated, negative where it was freed; in the order of time. Memory
            from before the record counts for nothing, also where it is freed.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._blocks: dict[int, int] = {}  # address: index in `entries`, of what is there now
        self._start()

    def mark(self, name: str) -> None:
        """What follows belongs to ``name``. Also within an operation, where :meth:`settle` may not be called."""
        with record_function(_MARK + name):
            pass

    def settle(self) -> None:
        """From here on, of large blocks that are there only pages that were written count."""
        self.stop()
        for address, index in self._blocks.items():
            size = self.entries[index]
            if size >= _LARGE:
                self.entries[index] = size - _unwritten(address, size)
        self._start()

    def _start(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _without_stderr():
            self._profiler.start()

    def stop(self) -> None:
        """Take over what the profiler has seen: its trace has addresses, which no other public face of it has."""
        with _without_stderr(), tempfile.TemporaryDirectory(prefix="smddp-plan-") as directory:
            self._profiler.stop()
            path = Path(directory, "trace.json")
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        for event in sorted((event for event in events if "ts" in event), key=itemgetter("ts")):
            name = event["name"]
            if name.startswith(_MARK):
                self.entries.append(name.removeprefix(_MARK))
            elif name == "[memory]":
                self._count(event["args"]["Addr"], event["args"]["Bytes"])

    def _count(self, address: int, size: int) -> None:
        if size > 0:
            self._blocks[address] = len(self.entries)
            self.entries.append(size)
        elif address in self._blocks:
            # As many bytes as it counts by now, which may be fewer than it has: see `settle`.
            self.entries.append(-self.entries[self._blocks.pop(address)])


@contextmanager
def recorded_memory() -> Iterator[MemoryRecord]:
    """Record what the CPU allocator does within; entries are there afterwards."""
    record = MemoryRecord()
    try:
        yield record
    finally:
        record.stop()


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
