"""Ranks that may be killed: plain processes that run one of ``scenarios``, without torch, so that they start fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.leaks import descendants

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Rank:
    """A rank's process, seen from the test."""

    process: subprocess.Popen[bytes]
    directory: Path
    number: int
    seconds: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.returncode

    @property
    def out(self) -> str:
        return (self.directory / f"out-{self.number}").read_text()

    @property
    def err(self) -> str:
        return (self.directory / f"err-{self.number}").read_text()

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""

    def values(self, name: str) -> list[Any]:
        """What the rank said under ``name``."""
        lines = [line.partition(" ") for line in self.out.splitlines() if line.endswith("}")]
        return [json.loads(text)["value"] for word, _, text in lines if word == name]


@dataclass
class Job:
    """All ranks of a scenario."""

    directory: Path
    ranks: list[Rank] = field(default_factory=list)

    def until(self, name: str, timeout: float = 20.0) -> None:
        """Until every rank has said ``name``."""
        self._until(lambda rank: rank.values(name), self.ranks, f"say {name!r}", timeout)

    def until_stopped(self, number: int, at: int | None = None) -> None:
        """Until rank ``number`` is stopped, and all the others wait for it in step ``at``, if that is given."""
        others = [rank for rank in self.ranks if rank.number != number and at is not None]
        self._until(lambda rank: (self.directory / f"meet-{at}-{rank.number}").exists(), others, f"come to step {at}")
        pid = self.ranks[number].pid
        self._until(lambda _: any(p.pid == pid and p.state == "T" for p in descendants()), [self.ranks[number]], "stop")

    def until_heard(self, number: int) -> None:
        """Until rank ``number`` has said on stderr that all ranks stop, as the first one does."""
        self._until(lambda rank: "all ranks stop at" in rank.err, [self.ranks[number]], "hear of the signal")

    def _until(self, ready: Callable[[Rank], object], ranks: list[Rank], what: str, timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while waiting := [rank for rank in ranks if not ready(rank)]:
            ended = [rank for rank in waiting if rank.process.poll() is not None and not ready(rank)]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"ranks {[r.number for r in ended or waiting]} did not {what}:\n{self.text()}")
            time.sleep(0.01)

    def wait(self, timeout: float) -> float:
        """Until all have ended, or fail; returns the seconds. Sets each rank's ``seconds``."""
        start = time.monotonic()
        running = list(self.ranks)
        while running:
            for rank in list(running):
                if rank.process.poll() is not None:
                    rank.seconds = time.monotonic() - start
                    running.remove(rank)
            if time.monotonic() - start > timeout:
                raise AssertionError(f"ranks {[r.number for r in running]} run after {timeout} s:\n{self.text()}")
            time.sleep(0.01)
        return time.monotonic() - start

    def text(self) -> str:
        return "\n".join(f"---- rank {r.number}: {r.code}\n{r.out}\n{r.err}" for r in self.ranks)


@contextmanager
def job(directory: Path, scenario: str, world_size: int, *wrapper: str, **options: Any) -> Iterator[Job]:
    """Start ``world_size`` ranks of ``scenario``; kill what is left of them in the end."""
    started = Job(directory)
    sessions = []
    try:
        for number in range(world_size):
            arguments = [scenario, str(number), str(world_size), str(directory), json.dumps(options)]
            command = [sys.executable, "-m", "tests.supervision.scenarios", *arguments]
            with open(directory / f"out-{number}", "wb") as out, open(directory / f"err-{number}", "wb") as err:
                process = subprocess.Popen(
                    [*wrapper, *command], cwd=ROOT, stdout=out, stderr=err, start_new_session=True
                )
            sessions.append(process.pid)
            started.ranks.append(Rank(process, directory, number))
        yield started
    finally:
        while left := [p for p in descendants() if p.session in sessions]:
            for peer in left:
                kill(peer.pid)
            time.sleep(0.01)
        for rank in started.ranks:
            rank.process.wait()


def left_over(started: Job, but: tuple[int, ...] = ()) -> list[str]:
    """Processes of the job's sessions that are still there."""
    sessions = {rank.pid for rank in started.ranks}
    return [str(p) for p in descendants() if p.session in sessions and p.pid not in but]


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return
