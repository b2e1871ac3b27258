"""The thread that watches over the works of the simulated NCCL: one that takes too long ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

DUMP_S = 1.0  # between the message and the end; NCCL's takes a minute
INTERVAL_S = 0.05


@dataclass(eq=False)
class Entry:
    """A work that has been enqueued."""

    group: Any
    name: str
    deadline: float
    limit_s: float
    error: str = ""


class Watchdog:
    """Knows what has been enqueued and is not done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._runs = False

    def started(self, group: Any, name: str, limit: timedelta) -> Entry:
        limit_s = limit.total_seconds()
        entry = Entry(group, name, time.monotonic() + limit_s, limit_s)
        with self._lock:
            self._entries.append(entry)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="simulated NCCL watchdog", daemon=True).start()
        return entry

    def finished(self, entry: Entry) -> None:
        with self._lock:
            if entry in self._entries:
                self._entries.remove(entry)

    def forget(self, group: Any) -> None:
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.group is not group]

    def errors(self) -> list[str]:
        """Of works that have failed: their streams stand still."""
        with self._lock:
            return [f"{entry.name} failed: {entry.error}" for entry in self._entries if entry.error]

    def _late(self) -> Entry | None:
        with self._lock:
            return next((entry for entry in self._entries if time.monotonic() > entry.deadline), None)

    def _run(self) -> None:
        while (entry := self._late()) is None:
            time.sleep(INTERVAL_S)
        rank = os.environ.get("RANK", "?")
        print(
            f"[Rank {rank}] Watchdog caught collective operation timeout: {entry.name} ran for more than "
            f"{entry.limit_s:g} s {entry.error}\n"
            f"[Rank {rank}] To avoid data inconsistency, we are taking the entire process down.",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(DUMP_S)
        os.kill(os.getpid(), signal.SIGABRT)  # as std::terminate does: no exception, no handler of Python's


watchdog = Watchdog()
