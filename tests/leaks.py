"""What a test may leave behind by accident, read from /proc; elsewhere than on Linux those lists are empty.

``Snapshot.take()`` before a test and ``snapshot.leaks()`` after it: ``conftest.py`` does so for every test.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

PR_SET_CHILD_SUBREAPER = 36
TCP_LISTEN = "0A"
# Written by pytest itself between the phases of a test.
PYTEST_VARIABLES = {"PYTEST_CURRENT_TEST"}
# One of each lives as long as the session: multiprocessing's own helpers.
HELPER_COMMANDS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


@dataclass(frozen=True)
class ProcessInfo:
    """One line of /proc/<pid>/stat, in the terms of proc(5)."""

    pid: int
    state: str
    parent: int
    session: int

    @property
    def command(self) -> str:
        try:
            raw = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return "(gone)"
        return raw.replace(b"\0", b" ").decode(errors="replace").strip()

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command[:120]})"


def live_processes() -> list[ProcessInfo]:
    """Every process of the machine that has not exited (a zombie has)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in "ZX":
            found.append(ProcessInfo(int(entry.parent.name), fields[0], int(fields[1]), int(fields[3])))
    return found


def adopt_orphans() -> None:
    """Become the new parent of descendants whose parent dies, so that none escapes ``child_processes``."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def child_processes() -> set[str]:
    """Children of this process, and of multiprocessing's fork server, without those two helpers."""
    processes = live_processes()
    children = [p for p in processes if p.parent == os.getpid()]
    helpers = {p.pid for p in children if any(name in p.command for name in HELPER_COMMANDS)}
    grandchildren = [p for p in processes if p.parent in helpers]
    return {str(p) for p in [*children, *grandchildren] if p.pid not in helpers}


def _mapped_elsewhere(name: str) -> bool:
    """Whether a process that does not descend from this one uses /dev/shm/``name``."""
    processes = live_processes()
    ours, size = {os.getpid()}, 0
    while size != len(ours):
        size = len(ours)
        ours |= {p.pid for p in processes if p.parent in ours}
    for process in processes:
        try:
            if process.pid not in ours and f"/dev/shm/{name}" in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    try:
        return set(os.listdir("/dev/shm"))
    except OSError:
        return set()


def listening_sockets() -> set[str]:
    """Addresses (hexadecimal, as the kernel writes them) on which this process accepts TCP connections."""
    inodes = set()
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    rows = []
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        if table.exists():
            rows += [line.split() for line in table.read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == TCP_LISTEN and row[9] in inodes}


def _settled_difference(look: Callable[[], set[str]], before: Iterable[str], patience_s: float) -> list[str]:
    """What ``look`` sees beyond ``before``, after giving things that are on their way out time to go."""
    deadline = time.monotonic() + patience_s
    while (extra := look() - set(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(extra)


@dataclass(frozen=True)
class Snapshot:
    """The state that a test must leave as it found it."""

    environment: dict[str, str]
    children: set[str]
    shared_memory: set[str]
    sockets: set[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(dict(os.environ), child_processes(), shared_memory(), listening_sockets())

    def leaks(self, patience_s: float = 2.0) -> list[str]:
        """Return one line per leak; restore the environment and the default process group on the way."""
        found = self._restore_environment()
        if dist.is_initialized():
            dist.destroy_process_group()
            found.append("the default process group is still initialized")
        found += [f"{p} still runs" for p in _settled_difference(child_processes, self.children, patience_s)]
        segments = _settled_difference(self._new_shared_memory, (), patience_s)
        found += [f"/dev/shm/{name} still exists" for name in segments]
        sockets = _settled_difference(listening_sockets, self.sockets, patience_s)
        found += [f"a socket still listens on {address}" for address in sockets]
        return found

    def _new_shared_memory(self) -> set[str]:
        names = {name for name in shared_memory() - self.shared_memory if not _mapped_elsewhere(name)}
        return names & shared_memory()  # another process may have removed one while it was looked up

    def _restore_environment(self) -> list[str]:
        found = []
        for name in sorted({*self.environment, *os.environ} - PYTEST_VARIABLES):
            old, new = self.environment.get(name), os.environ.get(name)
            if old == new:
                continue
            found.append(f"environment variable {name} changed from {old!r} to {new!r}")
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old
        return found
