"""Processes of this host, as /proc shows them to everyone: one and the same by its start time, stopped, or ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import NamedTuple

from lightning_smddp.communication.topology import node_identity

# Fields of /proc/PID/stat after the command's name, by proc(5)'s number less 3.
_STATE, _START, _EXIT_CODE = 0, 19, 49


def _stat(pid: int) -> list[str]:
    """The fields of its stat file from ``_STATE`` on; empty if it is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The command's name before is in parentheses, and may have spaces and parentheses of its own.
    return text.rpartition(")")[2].split()


def name_of(signum: int) -> str:
    """Such as ``SIGTERM``; real-time signals have none."""
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"


class Process(NamedTuple):
    """A process that no later one can be taken for: the id comes again, with another start time.

    Attributes:
        host: its host's name.
        pid: its id.
        start: in clock ticks since boot.
        namespace: where process ids mean the same: node and process-id namespace. Its own where that is unknown.
    """

    host: str
    pid: int
    start: str
    namespace: str

    @classmethod
    def own(cls) -> Process:
        """The process that calls this. Outside of Linux without start time: nobody can look at it."""
        fields = _stat(os.getpid())
        if not fields:
            return cls(socket.gethostname(), os.getpid(), "", f"{socket.gethostname()}/{os.getpid()}")
        namespace = f"{node_identity()}/{os.readlink('/proc/self/ns/pid')}"
        return cls(socket.gethostname(), os.getpid(), fields[_START], namespace)

    def look(self) -> tuple[bool, str]:
        """Whether it is stopped, and how it ended; empty if it did not."""
        fields = _stat(self.pid)
        if not fields or fields[_START] != self.start:
            return False, "its process ended"
        if fields[_STATE] not in "ZX":
            return fields[_STATE] == "T", ""
        code = os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
        if code >= 0:
            return False, f"its process exited with code {code}"
        hint = ", which the kernel sends, too, for lack of memory (OOM)" if code == -signal.SIGKILL else ""
        return False, f"its process was killed by {name_of(-code)}{hint}"

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped one."""
        if not self.look()[1]:
            with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
                os.kill(self.pid, signal.SIGKILL)
