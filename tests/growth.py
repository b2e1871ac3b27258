"""How much memory a process takes at most, of its own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_M_MMAP_THRESHOLD = -3  # of malloc.h


def held(sharing: int) -> int:
    """Bytes of this process that are no file's; of memory that so many ranks share each has its part."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return sizes["RssAnon"] + sizes["RssShmem"] // sharing


def measurable() -> None:
    """From here on what is freed goes back to the system at once, and nothing is made where something was freed."""
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


class Growth:
    """Of memory inside of :meth:`watching`, at most, until ``done`` is set."""

    def __init__(self, sharing: int) -> None:
        self.sharing, self.done = sharing, threading.Event()
        self.most, self.start = 0, held(sharing)

    @contextmanager
    def watching(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._look)
        watcher.start()
        try:
            yield
        finally:
            self.done.set()
            watcher.join()

    def _look(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, held(self.sharing) - self.start)
