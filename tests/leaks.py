"""What a test may leave behind by accident, read from /proc; elsewhere than on Linux those lists are empty.

``Snapshot.take()`` before a test and ``snapshot.leaks()`` after it: ``conftest.py`` does so for every test.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

PR_SET_CHILD_SUBREAPER = 36
TCP_LISTEN = "0A"
# Written by pytest between the phases of a test, and by torch where it imports its compiler, as an optimizer may.
VARIABLES_OF_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
# One of each lives as long as the session: multiprocessing's own helpers.
HELPER_COMMANDS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
# In the names of semaphores of this process and those that it starts: multiprocessing's own do not tell whose. Workers
# of one session, which run tests beside each other, are told apart.
SEMAPHORES = os.environ.setdefault("TESTS_SEMAPHORES", f"tests{os.getpid()}")
SEMAPHORES += os.environ.get("PYTEST_XDIST_WORKER", "")


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
    found = (_info(pid) for pid in filter(str.isdigit, os.listdir("/proc")))
    return [process for process in found if process is not None]


def _info(pid: str) -> ProcessInfo | None:
    """None if it has exited."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split(maxsplit=4)
    except OSError:
        return None
    if not fields or fields[0] in b"ZX":
        return None
    return ProcessInfo(int(pid), fields[0].decode(), int(fields[1]), int(fields[3]))


def descendants() -> list[ProcessInfo]:
    """Those of ``live_processes`` that come from this one, which has called ``adopt_orphans``.

    A kernel with CONFIG_PROC_CHILDREN names the children of each thread: some files to read instead of one for each
    process of the machine, twice a test.
    """
    if not os.path.exists("/proc/thread-self/children"):
        return _descendants_among(live_processes())
    found: list[ProcessInfo] = []
    parents = [str(os.getpid())]
    while parents:
        children = _children(parents.pop())
        parents += children
        found += [process for process in map(_info, children) if process is not None]
    return found


def _children(pid: str) -> list[str]:
    found: list[str] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as children:
                found += children.read().split()
    except OSError:  # it ended meanwhile; whom it leaves behind comes to this process
        pass
    return found


def _descendants_among(processes: list[ProcessInfo]) -> list[ProcessInfo]:
    ours, size = {os.getpid()}, 0
    while size != len(ours):
        size = len(ours)
        ours |= {p.pid for p in processes if p.parent in ours}
    return [p for p in processes if p.pid in ours and p.pid != os.getpid()]


def adopt_orphans() -> None:
    """Become the new parent of descendants whose parent dies, so that none escapes ``child_processes``."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_semaphores() -> None:
    """From now on of this process, and of those that it starts through ``multiprocessing``."""
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/mp-{SEMAPHORES}"


def child_processes() -> set[str]:
    """Children of this process, and of multiprocessing's fork server, without those two helpers."""
    processes = descendants()
    children = [p for p in processes if p.parent == os.getpid()]
    helpers = {p.pid for p in children if any(name in p.command for name in HELPER_COMMANDS)}
    grandchildren = [p for p in processes if p.parent in helpers]
    return {str(p) for p in [*children, *grandchildren] if p.pid not in helpers}


def _used_elsewhere(name: str) -> bool:
    """Whether a process that does not descend from this one has mapped /dev/shm/``name``, or gave it its number."""
    processes = live_processes()
    ours = {os.getpid(), *(p.pid for p in _descendants_among(processes))}
    numbers = set(re.findall(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])", name))
    for process in processes:
        if process.pid in ours:
            continue
        try:
            if str(process.pid) in numbers or f"/dev/shm/{name}" in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def shared_memory() -> set[str]:
    """Names in /dev/shm, without semaphores of others."""
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return set()
    return {name for name in names if not name.startswith("sem.") or f"{SEMAPHORES}-" in name}


def sockets() -> set[str]:
    """Those of this process, by inode."""
    inodes = set()
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return inodes
    for descriptor in descriptors:
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def listening(inodes: set[str]) -> set[str]:
    """Addresses (hexadecimal, as the kernel writes them) on which these sockets accept TCP connections."""
    rows: list[list[str]] = []
    if not inodes:
        return set()
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
        return cls(dict(os.environ), child_processes(), shared_memory(), sockets())

    def leaks(self, patience_s: float = 2.0, memory: bool = True) -> list[str]:
        """Return one line per leak; restore the environment and the default process group on the way.

        ``memory``: whether to look at /dev/shm, too.
        """
        found = self._restore_environment()
        if dist.is_initialized():
            dist.destroy_process_group()
            found.append("the default process group is still initialized")
        found += [f"{p} still runs" for p in _settled_difference(child_processes, self.children, patience_s)]
        if memory:
            segments = _settled_difference(self.new_shared_memory, (), patience_s)
            found += [f"/dev/shm/{name} still exists" for name in segments]
        addresses = _settled_difference(lambda: listening(sockets() - self.sockets), (), patience_s)
        found += [f"a socket still listens on {address}" for address in addresses]
        return found

    def new_shared_memory(self) -> set[str]:
        names = {name for name in shared_memory() - self.shared_memory if not _used_elsewhere(name)}
        return names & shared_memory()  # another process may have removed one while it was looked up

    def _restore_environment(self) -> list[str]:
        found = []
        for name in sorted({*self.environment, *os.environ} - VARIABLES_OF_OTHERS):
            old, new = self.environment.get(name), os.environ.get(name)
            if old == new:
                continue
            found.append(f"environment variable {name} changed from {old!r} to {new!r}")
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old
        return found
