"""Processes of this host, as /proc shows them to everyone: one and the same by its start time, stopped, or ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_smddp.supervision.failure import Kind

NEIGHBOURS = 8  # processes of this host that a rank looks at
STOPPED_S = 3.0  # one that is stopped for so long has failed
# Fields of /proc/PID/stat after the command's name, by proc(5)'s number less 3.
_STATE, _START, _EXIT_CODE = 0, 19, 49


def _stat(pid: int) -> list[str]:
    """The fields of its stat file from ``_STATE`` on; empty if it is not there."""
    try:
        # Without a buffer: this is done twice a second for each neighbour.
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # The command's name before is in parentheses, and may have spaces and parentheses of its own.
    return text.rpartition(")")[2].split()


class Process(NamedTuple):
    """A process that no later one can be taken for: the id comes again, with another start time.

    Attributes:
        host: its host's name.
        pid: its id.
        start: in clock ticks since boot.
        namespace: where process ids mean the same: boot id and process-id namespace. Empty where unknown.
    """

    host: str
    pid: int
    start: str
    namespace: str

    @classmethod
    def own(cls) -> Process:
        """The process that calls this. Outside of Linux without start time and namespace: nobody can look at it."""
        start = namespace = ""
        with contextlib.suppress(OSError):  # not Linux: no other process can be looked at
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
            start = _stat(os.getpid())[_START]
        return cls(socket.gethostname(), os.getpid(), start, namespace)

    def look(self) -> tuple[bool, str]:
        """Whether it is stopped, and how it ended; empty if it did not."""
        fields = _stat(self.pid)
        if not fields or fields[_START] != self.start:
            return False, "its process ended"
        if fields[_STATE] not in "ZX":
            return fields[_STATE] == "T", ""
        # As waitpid(2) has it: the low seven bits are the signal's number, the second byte is the exit code.
        code = int(fields[_EXIT_CODE])
        if code & 0x7F == signal.SIGKILL:
            return False, "its process was killed by SIGKILL, which the kernel sends, too, for lack of memory (OOM)"
        if code & 0x7F in set(signal.Signals):
            return False, f"its process was killed by {signal.Signals(code & 0x7F).name}"
        return False, f"its process exited with code {code >> 8}"

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped one."""
        _, ended = self.look()
        if not ended:
            with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
                os.kill(self.pid, signal.SIGKILL)


class Neighbours:
    """Other ranks' processes on this host, as one looks at them again and again.

    Args:
        who: the process of each rank.
        local: the ranks of this host, nearest first. Rank 0, which may have the store, is looked at in any case.
    """

    def __init__(self, who: Sequence[Process], local: Sequence[int]) -> None:
        chosen = {*local[:NEIGHBOURS], 0} & {*local}
        self._processes = {rank: who[rank] for rank in chosen}
        self._stopped_s = dict.fromkeys(chosen, 0.0)

    def look(self, passed: float) -> dict[int, tuple[Kind, str]]:
        """Who has failed, and how; ``passed``: seconds since the last look."""
        found: dict[int, tuple[Kind, str]] = {}
        for rank, process in self._processes.items():
            is_stopped, ended = process.look()
            self._stopped_s[rank] = is_stopped * (self._stopped_s[rank] + passed)
            if ended:
                found[rank] = ("died", ended)
            elif self._stopped_s[rank] > STOPPED_S:
                found[rank] = ("fell silent", "its process is stopped (by SIGSTOP, or Ctrl+Z)")
        return found
