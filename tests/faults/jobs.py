"""Runs a :class:`~tests.faults.case.Case` as real processes, and tells how it ended."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import journal
from tests.faults.case import Case
from tests.faults.root import root_main
from tests.leaks import shared_memory
from tests.rank_processes import forked

START_LIMIT_S = 60.0
LIMIT_S = 40.0


@dataclass
class Result:
    """How a job ended. Times are in seconds from the fault; None: it did not happen.

    Attributes:
        code: of the first process, negative for a signal.
        codes: of each node's first process.
        seconds: until the last process of the job had gone.
        cut_off: whether that was by force, at the limit.
        ended: until each rank's process had gone.
        raised: until each rank raised.
        errors: what each rank raised in the end: type and message.
        stderr: of each rank.
        main_stderr: of the first process where that is no rank.
        output: what all of them printed.
        left: what the job left behind: processes, segments, temporary files.
        events: each rank's journal.
        directory: of the job; ``saved`` has its checkpoints.
    """

    case: Case
    code: int | None
    codes: list[int | None]
    seconds: float | None
    cut_off: bool
    ended: dict[int, float | None]
    raised: dict[int, float | None]
    errors: dict[int, str]
    stderr: dict[int, str]
    main_stderr: str
    output: str
    left: list[str]
    events: dict[int, list[dict[str, Any]]]
    directory: Path

    def describe(self) -> str:
        """All of it, for a test that fails."""
        lines = [str(self.case), f"codes {self.codes}, {self.seconds} s, cut off: {self.cut_off}, left: {self.left}"]
        lines += [f"ended {self.ended}, raised {self.raised}", f"errors {self.errors}"]
        lines += [f"---- rank {rank}\n{text}" for rank, text in self.stderr.items()]
        return "\n".join([*lines, f"---- main\n{self.main_stderr}\n---- output\n{self.output}"])

    def said_by(self, rank: int) -> str:
        """What a survivor says of the cause: its error, and its part of stderr."""
        return f"{self.errors.get(rank, '')}\n{self.stderr[rank]}"

    @property
    def checkpoints(self) -> list[Path]:
        """Complete ones, oldest first."""
        found = sorted(self.directory.glob("saved/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        return [path for path in found if not path.name.startswith(".")]


@contextmanager
def job(case: Case, directory: Path, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Start ``case``; wait for its end when the context ends. Read the outcome by :func:`outcome`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tmp").mkdir()
    case.write(directory / "case.json")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {journal.DIRECTORY: str(directory), "TMPDIR": str(directory / "tmp"), "PYTHONUNBUFFERED": "1"}
    if case.port is not None:
        environment["MASTER_PORT"] = str(case.port)
    process = forked(root_main, str(directory / "case.json"), environment, START_LIMIT_S, limit_s)
    try:
        yield
        process.join(START_LIMIT_S + limit_s + 20.0)
    finally:
        process.kill()  # which its children do not survive, unless it has seen their end
        process.join()
        process.close()


def run(case: Case, directory: Path, limit_s: float = LIMIT_S) -> Result:
    """Run ``case`` in ``directory``; its processes are gone afterwards, if need be ``limit_s`` after the fault."""
    segments = shared_memory()
    with job(case, directory, limit_s):
        pass
    return outcome(case, directory, segments)


def outcome(case: Case, directory: Path, segments: set[str]) -> Result:
    """Of a job that has ended; ``segments`` of shared memory were there before."""
    seen = json.loads((directory / "result.json").read_text())
    fault, ranks = seen["fault"], range(case.world_size)

    def since(at: float | None) -> float | None:
        return None if at is None or fault is None else at - fault

    events = {rank: journal.read(directory, rank) for rank in ranks}
    left = [*seen["running"], *(f"/dev/shm/{name}" for name in _segments_of(events, segments))]
    left += [str(path) for path in sorted((directory / "tmp").iterdir())]
    return Result(
        case=case,
        code=seen["codes"][0],
        codes=seen["codes"],
        seconds=since(seen["end"]),
        cut_off=bool(seen["running"]),
        ended={rank: since(seen["ends"].get(str(rank))) for rank in ranks},
        raised={rank: since(_at(events[rank])) for rank in ranks},
        errors={rank: text for rank in ranks if (text := _error(events[rank]))},
        stderr={rank: _read(directory / f"stderr-{rank}") for rank in ranks},
        main_stderr=_read(directory / "stderr-main"),
        output=_read(directory / "output"),
        left=left,
        events=events,
        directory=directory,
    )


def _segments_of(events: dict[int, list[dict[str, Any]]], before: set[str]) -> list[str]:
    """New names in /dev/shm: other programs of this machine make some too, so those that go away do not count."""
    deadline = time.monotonic() + 1.0
    while (new := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = {str(event["pid"]) for theirs in events.values() for event in theirs}
    return sorted(name for name in new if "smddp" in name or any(pid in name for pid in pids))


def _at(events: list[dict[str, Any]]) -> float | None:
    return next((event["at"] for event in events if event["event"] in ("raised", "explained")), None)


def _error(events: list[dict[str, Any]]) -> str:
    found = [event for event in events if event["event"] in ("raised", "explained")]
    return f"{found[-1]['type']}: {found[-1]['text']}" if found else ""


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """For jobs outside of pytest."""
    return tempfile.TemporaryDirectory(prefix="faults-")
