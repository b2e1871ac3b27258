"""The root of a job's processes: starts the first one, sees every end, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests import warm
from tests.faults import journal, memory
from tests.faults.case import Case
from tests.faults.nodes import nodes_of
from tests.leaks import adopt_orphans, descendants

ROOT = Path(__file__).parent.parent.parent
PROGRAM = "tests.faults.train"
POLL_S = 0.01
LOOK_EVERY_S = 0.1  # for new ranks and the fault


class Onlooker:
    """Watches the descendants of this process."""

    def __init__(
        self,
        case: Case,
        where: Path,
        mains: list[int],
        act: Callable[[str, int], None],
        start_limit_s: float,
        limit_s: float,
    ) -> None:
        self.where, self.mains, self.act, self.world_size = where, mains, act, case.world_size
        self.start_limit_s, self.limit_s = start_limit_s, limit_s
        self.begin = time.monotonic()
        self.codes: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.ends: dict[int, float] = {}
        self._fault: float | None = None
        self._looked = 0.0

    def watch(self) -> dict[str, Any]:
        """Until all have ended, or the limit is over; returns what was seen."""
        gone = False
        while not gone and not self._is_over():
            gone = self._reap()
            self._look(gone)
            time.sleep(0 if gone else POLL_S)
        end = time.monotonic()
        running = [str(process) for process in descendants()]
        self._kill_all()
        return {
            "codes": [self.codes.get(main) for main in self.mains], "fault": journal.fault_time(self.where),
            "end": end, "ends": self.ends, "running": running,
        }  # fmt: skip

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._fault is None:
            return now > self.begin + self.start_limit_s
        return now > self._fault + self.limit_s

    def _reap(self) -> bool:
        """Whether no process of the job is left: orphans become children of this one."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return False
                if pid in self.mains:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return True

    def _look(self, now: bool) -> None:
        request = self.where / "request"
        if request.exists():
            kind, node = request.read_text().split()
            self.act(kind, int(node))
            request.unlink()
        for rank, pid in self.pids.items():
            if rank not in self.ends and not is_alive(pid):
                self.ends[rank] = time.monotonic()
        if now or time.monotonic() - self._looked > LOOK_EVERY_S:
            self._looked = time.monotonic()
            self._fault = self._fault or journal.fault_time(self.where)
            for rank in range(self.world_size):
                events = [] if rank in self.pids else journal.read(self.where, rank)
                if events:
                    self.pids[rank] = events[0]["pid"]

    def _kill_all(self) -> None:
        while left := descendants():
            for process in left:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(POLL_S)
            self._reap()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def root_main(path: str, environment: dict[str, str], start_limit_s: float, limit_s: float) -> None:
    """Body of the root: runs the job of ``path`` and writes what it saw beside it."""
    adopt_orphans()
    os.setsid()
    where, case = Path(path).parent, Case.read(Path(path))
    os.chdir(ROOT)
    _write_to(where / "output")
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.SIG_IGN if case.ignores_sigint else signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with _started(case, where) as (mains, act):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        onlooker = Onlooker(case, where, mains, act, start_limit_s, limit_s)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        seen = onlooker.watch()
    memory.remove_cgroup(where)
    (where / "result.json").write_text(json.dumps(seen))


def _write_to(path: Path) -> None:
    for target, name in ((0, os.devnull), (1, str(path)), (2, str(path))):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, target)
        os.close(descriptor)


@contextmanager
def _started(case: Case, where: Path) -> Iterator[tuple[list[int], Callable[[str, int], None]]]:
    """The numbers of the first process of each node, and what can be done to nodes."""
    if not case.real:
        import tests.faults.train  # noqa: F401  once for all that are forked

        warm.fork_programs()
    if case.nodes > 1:
        with nodes_of(where) as nodes:
            nodes.start([_command(case, where, *nodes.torchrun(index)) for index in range(case.nodes)])
            yield nodes.mains, nodes.act
    else:
        main = _start(case, _command(case, where))
        (where / "main").write_text(str(main))
        yield [main], lambda kind, node: None


def _command(case: Case, where: Path, *more: str) -> list[str]:
    module = [PROGRAM, str(where / "case.json")]
    if case.launcher == "torchrun":
        ranks = [*(more or ["--standalone"]), "--nproc-per-node", str(case.devices)]
        module = ["torch.distributed.run", *ranks, "-m", *module]
    return [sys.executable, "-m", *module]


def _start(case: Case, command: list[str]) -> int:
    """The number of the job's first process, which leads a process group of its own."""
    if case.real:
        return subprocess.Popen(command, process_group=0).pid  # not waited for by this object
    main = warm.fork(command, os.environ)
    os.setpgid(main, main)
    return main


def _end_with_parent() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    for process in descendants():
        os.kill(process.pid, signal.SIGKILL)
    os._exit(1)
