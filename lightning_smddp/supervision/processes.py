"""Processes of this host: one and the same by its start time, its end and how it came, its workers, its death."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes), linux/pidfd.h; exit codes since Linux 6.15
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_EXIT_CODE_OFFSET = 60
# Fields of /proc/PID/stat after the command's name, by proc(5)'s number less 3.
_STATE = 0
_PARENT = 1
_START = 19
_EXIT_CODE = 49


@functools.cache
def namespace() -> str:
    """Boot id and process-id namespace: where process ids mean the same. Empty where unknown."""
    try:
        # Both, as containers of one machine have the same boot id, and process ids of their own.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot}/{pid_namespace}"


@dataclass(frozen=True)
class Process:
    """A process that no later one can be taken for: the id comes again, with another start time.

    Attributes:
        pid: its id.
        start: its start in clock ticks since boot; 0 if unknown.
        namespace: see :func:`namespace`.
    """

    pid: int
    start: int
    namespace: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this id now."""
        return cls(pid, _start(_stat(pid)), namespace())

    @classmethod
    def from_json(cls, values: list[Any]) -> Process:
        """From a list of the attributes; raises ``ValueError`` or ``TypeError`` for anything else."""
        pid, start, where = values
        return cls(int(pid), int(start), str(where))

    def to_json(self) -> list[Any]:
        """Its id, its start and its namespace, in this order."""
        return [self.pid, self.start, self.namespace]

    @property
    def is_here(self) -> bool:
        """Whether its id means the same to this process, so that it can be asked after."""
        return self.start > 0 and self.namespace == namespace() != ""

    def exists(self) -> bool:
        """Whether it runs or is stopped; one that ended and was not waited for yet (a zombie) does not."""
        fields = _stat(self.pid)
        if not fields or _start(fields) != self.start:
            return False
        return fields[_STATE] not in "ZX"

    def open(self) -> int | None:
        """A descriptor that becomes readable when it ends, or None. The caller closes it."""
        if not self.is_here or not hasattr(os, "pidfd_open"):
            return None
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:  # gone, or a kernel before 5.3
            return None
        # Read after that: if this process still has the id, it had it when the descriptor was opened.
        if _start(_stat(self.pid)) != self.start:
            os.close(descriptor)
            return None
        return descriptor

    def kill(self) -> bool:
        """SIGKILL to this very process, which also ends a stopped one; whether it was sent."""
        descriptor = self.open()
        if descriptor is None:
            return False
        # By descriptor: the number may be another process's by now.
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:  # it ended meanwhile, or belongs to another user
            return False
        finally:
            os.close(descriptor)
        return True

    def kill_with_workers(self, spare: Collection[int]) -> bool:
        """:meth:`kill` it and the processes it forked, such as DataLoader workers; not those numbered in ``spare``.

        Helpers that were started with a command of their own go on: some of them clean up.
        """
        if not self.is_here:
            return False
        workers = _workers(self)  # before its death, which makes them another process's children
        if not self.kill():
            return False
        for worker in workers:
            if worker.pid not in spare:
                worker.kill()
        return True


def has_ended(descriptor: int) -> bool:
    """Whether the process behind a descriptor of :meth:`Process.open` has."""
    poll = select.poll()  # unlike select(), takes descriptors above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def ending(pid: int, descriptor: int) -> str:
    """How a process that has ended did: ``was killed by SIGKILL``, ``exited with code 3``, or just ``ended``."""
    code = _exit_code(pid, descriptor)
    if code is None:
        return "ended"
    # As waitpid(2) has it: the low seven bits are the signal's number, the second byte is the exit code.
    number = code & 0x7F
    if number == 0:
        return f"exited with code {code >> 8}"
    name = f"signal {number}"
    if number in set(signal.Signals):
        name = signal.Signals(number).name
    return f"was killed by {name}"


def _exit_code(pid: int, descriptor: int) -> int | None:
    """The wait status, without being the parent: while a zombie from /proc, later from the descriptor."""
    fields = _stat(pid)
    if fields and fields[_STATE] in "ZX":
        return int(fields[_EXIT_CODE])
    import fcntl

    info = bytearray(64)
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:  # a kernel before 6.13
        return None
    # The first field was what is asked for, and is what the kernel has filled in.
    (filled,) = struct.unpack_from("=Q", info)
    if not filled & _PIDFD_INFO_EXIT:
        return None
    (code,) = struct.unpack_from("=i", info, _PIDFD_EXIT_CODE_OFFSET)
    return int(code)


def kill_own_workers() -> None:
    """SIGKILL to what this process started through ``multiprocessing``: DataLoader workers."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
            child.kill()


def oom_kills(counters: Sequence[str]) -> int:
    """How many processes the kernel killed for lack of memory, by the files :func:`oom_counters`; 0 if unknown."""
    total = 0
    for path in counters:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    _, count = line.split()
                    total += int(count)
    return total


def oom_counters(pid: int) -> tuple[str, ...]:
    """Where the kernel counts its kills for lack of memory in the cgroup of a process that runs.

    That of version 2 or 1; the whole machine's where there is none. In a cgroup the machine's says nothing: other jobs
    are killed, too.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        for line in lines:
            _, controllers, path = line.split(":", 2)  # version 2's line has no controllers
            if controllers == "":
                found.append(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in controllers.split(","):
                found.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return tuple(path for path in found if os.path.exists(path)) or ("/proc/vmstat",)


def _workers(parent: Process) -> list[Process]:
    """Children of ``parent`` that it forked without a new program, or that ``multiprocessing`` started."""
    command = _command(parent.pid)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        fields = _stat(pid)
        if not fields or int(fields[_PARENT]) != parent.pid:
            continue
        # A forked process has the command line of its parent; one that `multiprocessing` has spawned has this option.
        own = _command(pid)
        if own == command or b"--multiprocessing-fork" in own:
            found.append(Process(pid, _start(fields), parent.namespace))
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[str]:
    """The fields of its stat file from ``_STATE`` on; empty if it is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The command's name before is in parentheses, and may have spaces and parentheses of its own.
    _, _, fields = text.rpartition(")")
    return fields.split()


def _start(fields: list[str]) -> int:
    """When a process began, in clock ticks since boot; 0 if it is not there."""
    if not fields:
        return 0
    return int(fields[_START])
