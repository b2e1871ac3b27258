"""One copy of a model's parameters for all ranks of a node, which each rank may still write to as if it had its own.

An anonymous memory file is mapped twice by each rank::

    shared   writes are seen by all ranks: an optimizer's step writes its share here
    own      reads see the file; the first write to a page gives this rank a copy of that page (copy on write)

The parameters are views of ``own``. So what user code writes to them (clipping of weights, an average that is swapped
in for validation) stays with the rank that wrote it, as with memory of its own, and no rank can disturb another one in
mid-step. ``/proc/self/pagemap`` tells which pages were written; before a step their values go into the file, after it
they are dropped, so that the rank sees the file again.
"""

from __future__ import annotations

import math
import mmap
import os
import sys

import torch
from torch import Tensor

from lightning_smddp.communication.shared_segments import create_file

# Linux has 64 bits for each page of a process in /proc/self/pagemap. Bit 63, the sign, says that the page is in memory.
_ENTRY_BYTES = 8
_SWAPPED = 1 << 62
_OF_FILE = 1 << 61  # the page belongs to the file, or to memory that processes share


class NodeMemory:
    """Both mappings of one file.

    Args:
        descriptor: of the file, all of which is mapped. It belongs to the caller.

    Attributes:
        shared, own: all bytes, as uint8 tensors. They keep the mappings.
    """

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        self._own = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE)
        self.own = torch.frombuffer(self._own, dtype=torch.uint8)
        self.shared = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

    def view(self, dtype: torch.dtype, start: int, numel: int) -> Tensor:
        """``numel`` elements of ``own`` from the byte ``start`` on, as a tensor with a storage of just that size."""
        return torch.frombuffer(self._own, dtype=dtype, count=numel, offset=start)

    def written_pages(self) -> Tensor:
        """Numbers of the pages that this rank has written to since they were dropped, ascending (int64)."""
        first = self.own.data_ptr() // mmap.PAGESIZE
        count = math.ceil(self.own.numel() / mmap.PAGESIZE)
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * _ENTRY_BYTES)
            told = bytearray(pagemap.read(count * _ENTRY_BYTES))
        entries = torch.frombuffer(told, dtype=torch.int64)
        # A page of a private mapping is of the file until it is written; its copy is anonymous memory. So a page that
        # exists, in memory or swapped out, and is not of the file, is one that this rank has written.
        is_in_memory = entries < 0
        is_swapped = (entries & _SWAPPED).bool()
        is_of_file = (entries & _OF_FILE).bool()
        is_written = (is_in_memory | is_swapped) & ~is_of_file
        return is_written.nonzero().view(-1)

    def publish(self, pages: Tensor, start: int, stop: int) -> None:
        """Write this rank's bytes [start, stop), as far as they are on ``pages``, into the file."""
        for first, end in page_ranges(pages):
            low = max(first, start)
            high = min(end, stop)
            if low < high:
                self.shared[low:high].copy_(self.own[low:high])

    def differing(self, pages: Tensor) -> Tensor:
        """Those of ``pages`` whose bytes are not the file's: some are written with what was there."""
        found = []
        for page in pages.tolist():
            low = page * mmap.PAGESIZE
            high = low + mmap.PAGESIZE  # of the last page maybe behind the tensors' end, where a slice ends, too
            if not torch.equal(self.own[low:high], self.shared[low:high]):
                found.append(page)
        return torch.tensor(found, dtype=torch.int64)

    def drop(self, pages: Tensor) -> None:
        """Forget what this rank wrote on ``pages``: it sees the file there again."""
        for low, high in page_ranges(pages):
            self._own.madvise(mmap.MADV_DONTNEED, low, high - low)


def page_ranges(pages: Tensor) -> list[tuple[int, int]]:
    """Ranges [low, high) of bytes that ascending numbers of pages make: ``[3, 4, 7]`` are two."""
    ranges: list[tuple[int, int]] = []
    for page in pages.tolist():
        low = page * mmap.PAGESIZE
        high = low + mmap.PAGESIZE
        if ranges and ranges[-1][1] == low:  # goes on where the last range ends
            low, _ = ranges.pop()
        ranges.append((low, high))
    return ranges


def unsupported() -> str | None:
    """Why this system cannot do it; None if it can. What POSIX leaves open is tried on two pages."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    try:
        descriptor = create_file(2 * mmap.PAGESIZE)
        try:
            memory = NodeMemory(descriptor)
        finally:
            os.close(descriptor)
        works = _works(memory)
    except OSError as error:
        return f"no memory can be shared: {error}"
    if not works:
        return "this system does not tell which pages of a private mapping were written"
    return None


def _works(memory: NodeMemory) -> bool:
    """Whether a write to the first page is seen by all, and one to the second is told, and gone when it is dropped."""
    second = mmap.PAGESIZE
    int(memory.own.sum())  # both pages are read, so that they are known
    memory.shared[0] = 1
    memory.own[second] = 2
    sees = memory.own[0] == 1 and memory.shared[second] == 0
    tells = memory.written_pages().tolist() == [1]
    memory.drop(torch.tensor([1]))
    forgets = memory.own[second] == 0
    return bool(sees and tells and forgets)
