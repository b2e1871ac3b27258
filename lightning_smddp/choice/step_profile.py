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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_smddp.pipeline.capture.preserve_state import preserve_state

BACKWARD = "backward"  # the forward is over
_CPU = torch.device("cpu")
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


def profile_step(loss_of_step: Callable[[], Tensor], root: nn.Module) -> StepProfile:
    """Run a step's forward, which returns the loss, and its backward. Nothing of it stays."""
    with preserve_state(root, _CPU), dropped_gradients(root), recorded_memory() as record:
        loss = loss_of_step()
        record.settle()
        record.mark(BACKWARD)
        loss.backward()
        del loss
    return profile_of(record)


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


def profile_of(record: MemoryRecord) -> StepProfile:
    """The profile of a record with the mark :data:`BACKWARD`."""
    now = 0
    kept = 0
    peak = 0
    for entry in record.entries:
        if entry == BACKWARD:
            kept = now
        elif isinstance(entry, int):
            now += entry
            peak = max(peak, now)
    return StepProfile(kept, peak)


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


@contextmanager
def dropped_gradients(root: nn.Module) -> Iterator[None]:
    """Within it a parameter's gradient is freed when it is complete, as DDP does when it has it in its bucket."""
    trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(_drop) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
