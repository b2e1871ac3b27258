"""Ranks that may be killed: processes that run a function of ``scenarios``, with a store that rank 0 serves."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_smddp.supervision import Supervisor
from tests.leaks import descendants
from tests.rank_processes import forked


@dataclass
class Rank:
    """A rank, inside of its process."""

    rank: int
    world_size: int
    directory: Path
    store: dist.Store
    options: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.options.get(name)

    def start(self) -> Supervisor:
        timeout, grace = self["collective_timeout"] or 60.0, self["stop_grace"] or 60.0
        return Supervisor(self.store, self.rank, self.world_size, timeout, grace)


def say(name: str, value: Any = None) -> None:
    """For :meth:`Process.values`."""
    print(name, json.dumps({"value": value}), flush=True)


def _main(body: Callable[[Rank], None], number: int, world_size: int, directory: Path, options: dict[str, Any]) -> None:
    os.setsid()
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(directory / f"{name}-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        body(Rank(number, world_size, directory, _store(number, directory), options))
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _store(number: int, directory: Path) -> dist.Store:
    path = directory / "port"
    if number == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    while not path.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False, wait_for_workers=False)


@dataclass
class Process:
    """A rank's process, seen from the test."""

    process: Any
    directory: Path
    number: int

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def code(self) -> int | None:
        return self.process.exitcode  # type: ignore[no-any-return]

    @property
    def err(self) -> str:
        path = self.directory / f"err-{self.number}"
        return path.read_text() if path.exists() else ""

    def values(self, name: str) -> list[Any]:
        """What the rank said under ``name``."""
        path = self.directory / f"out-{self.number}"
        text = path.read_text() if path.exists() else ""
        lines = [line.partition(" ") for line in text.splitlines() if line.endswith("}")]
        return [json.loads(text)["value"] for word, _, text in lines if word == name]


@dataclass
class Job:
    """All ranks of a scenario."""

    directory: Path
    ranks: list[Process] = field(default_factory=list)

    def until(self, name: str, ranks: list[Process] | None = None, timeout: float = 30.0) -> None:
        """Until every rank has said ``name``."""
        deadline = time.monotonic() + timeout
        while waiting := [rank for rank in ranks or self.ranks if not rank.values(name)]:
            ended = [rank for rank in waiting if rank.code is not None and not rank.values(name)]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"ranks {[r.number for r in ended or waiting]} did not say {name}:\n{self.text()}")
            time.sleep(0.02)

    def wait(self, timeout: float = 20.0) -> float:
        """Until all have ended, and nothing of them is left, or fail; returns the seconds."""
        start = time.monotonic()
        while running := [rank.number for rank in self.ranks if rank.code is None]:
            if time.monotonic() - start > timeout:
                raise AssertionError(f"ranks {running} run after {timeout} s:\n{self.text()}")
            time.sleep(0.02)
        return time.monotonic() - start

    @property
    def codes(self) -> list[int | None]:
        return [rank.code for rank in self.ranks]

    def left_over(self) -> list[str]:
        """Processes of the job that are still there."""
        sessions = {rank.pid for rank in self.ranks}
        return [str(process) for process in descendants() if process.session in sessions]

    def text(self) -> str:
        return "\n".join(f"---- rank {r.number}: {r.code}\n{r.err}" for r in self.ranks)


@contextmanager
def job(directory: Path, body: Callable[[Rank], None], world_size: int, **options: Any) -> Iterator[Job]:
    """Start ``world_size`` ranks of ``body``; kill what is left of them in the end."""
    started = Job(directory)
    try:
        for number in range(world_size):
            process = forked(_main, body, number, world_size, directory, options)
            started.ranks.append(Process(process, directory, number))
        yield started
    finally:
        sessions = {rank.pid for rank in started.ranks}
        while left := [process for process in descendants() if process.session in sessions]:
            for process in left:
                kill(process.pid)
            time.sleep(0.01)
        for rank in started.ranks:
            rank.process.kill()  # in case it had no session yet
            rank.process.join()
            rank.process.close()


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return
