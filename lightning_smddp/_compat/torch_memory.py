"""What torch's CPU allocator gives out and gets back, one by one, as far as it takes memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "lightning_smddp: "
_LARGE = 2**20  # bytes: smaller blocks are not looked at page by page
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class MemoryRecord:
    """Marks and allocations in the order of time.

    A block whose pages nobody has written takes no memory: of oneDNN's workspace for an LSTM the forward pass writes a
    third. See :meth:`settle`.

    Attributes:
        entries: marks, and bytes: of what was allocated, negative where it was freed. Memory from before the record
            counts for nothing, also where it is freed.
    """

    entries: list[str | int] = field(default_factory=list)
    _blocks: dict[int, int] = field(default_factory=dict)  # address: index in `entries`, of what is there now
    _profiler: Any = None

    def mark(self, name: str) -> None:
        """What follows belongs to ``name``. Also within an operation, where :meth:`settle` may not be called."""
        with record_function(_MARK + name):
            pass

    def settle(self) -> None:
        """From here on, of large blocks that are there only pages that were written count."""
        self._stop()
        for address, index in self._blocks.items():
            size = self.entries[index]
            assert isinstance(size, int)
            if size >= _LARGE:
                self.entries[index] = size - _unwritten(address, size)
        self._start()

    def _start(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _without_stderr():
            self._profiler.start()

    def _stop(self) -> None:
        """Take over what the profiler has seen.

        Its tree of events has addresses, which no public function gives. Remove when there is one.
        """
        with _without_stderr():
            self._profiler.stop()
        results = self._profiler.profiler.kineto_results
        for address, size in _allocations(results.experimental_event_tree()):
            if isinstance(size, str):
                self.entries.append(size)
            elif size > 0:
                self._blocks[address] = len(self.entries)
                self.entries.append(size)
            elif address in self._blocks:
                # As many bytes as it counts by now, which may be fewer than it has: see `mark`.
                index = self._blocks.pop(address)
                counted = self.entries[index]
                assert isinstance(counted, int)
                self.entries.append(-counted)


@contextmanager
def recorded_memory() -> Iterator[MemoryRecord]:
    """Record what the CPU allocator does within; entries are there afterwards."""
    record = MemoryRecord()
    record._start()
    try:
        yield record
    finally:
        record._stop()


def _allocations(tree: list[Any]) -> list[tuple[int, int | str]]:
    """Address and bytes of what was allocated on the CPU, negative where it was freed; marks; in the order of time."""
    found = []
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name.startswith(_MARK):
            found.append((event.start_time_ns, 0, event.name.removeprefix(_MARK)))
        elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    found.sort(key=itemgetter(0))
    return [(address, size) for _, address, size in found]


def _unwritten(address: int, size: int) -> int:
    """Bytes of whole pages of a block that have no memory yet; 0 where the system does not tell."""
    # The pages that are the block's alone: the first one begins at or behind its address, the last one ends in it.
    first = (address + _PAGE - 1) // _PAGE
    behind = (address + size) // _PAGE
    with suppress(OSError), open("/proc/self/pagemap", "rb") as pages:
        # The file has 64 bits for each page, little-endian. The two upper ones, those of the eighth byte, say that the
        # page is in memory, or swapped.
        pages.seek(8 * first)
        entries = pages.read(8 * (behind - first))
        upper_bytes = entries[7::8]
        unwritten = sum(byte < 2**6 for byte in upper_bytes)
        return _PAGE * unwritten
    return 0


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Around the profiler's start and stop, which it writes to the process's stderr whatever torch's log level is."""
    # torch writes from C++, past `sys.stderr`: the descriptor itself leads elsewhere meanwhile.
    sys.stderr.flush()
    saved = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)
