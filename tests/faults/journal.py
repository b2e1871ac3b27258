"""What the processes of a job leave in its directory for the one that looks on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DIRECTORY = "FAULTS_DIRECTORY"  # environment variable


def directory() -> Path:
    """Of this job."""
    return Path(os.environ[DIRECTORY])


def note(rank: int, event: str, **details: Any) -> None:
    """One line of ``rank``'s journal. ``at`` is of a clock that all processes of the machine share."""
    line = json.dumps({"event": event, "at": time.monotonic(), "pid": _process_id(), **details}) + "\n"
    with open(directory() / f"rank-{rank}.jsonl", "a") as file:
        file.write(line)


def _process_id() -> int:
    """This process's, as the one that looks on counts: a node of a job has process ids of its own."""
    outside = directory() / "proc" / "self"
    return int(os.readlink(outside)) if outside.is_symlink() else os.getpid()


def read(where: Path, rank: int) -> list[dict[str, Any]]:
    """What ``rank`` noted; a line that it had no time to finish is left out."""
    path = where / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def note_fault() -> None:
    """The fault happens now."""
    path = directory() / "fault"
    if not path.exists():
        path.write_text(repr(time.monotonic()))


def fault_time(where: Path) -> float | None:
    """When it did; None if it has not."""
    path = where / "fault"
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None


def ask(kind: str) -> None:
    """Have the one that looks on do something to this process's node; returns when it is done."""
    request = directory() / "request"
    request.with_suffix(".new").write_text(f"{kind} {os.environ['NODE_RANK']}")
    request.with_suffix(".new").rename(request)
    while request.exists():
        time.sleep(0.005)


def main_process() -> int:
    """The first process of the job: the script, or what starts the ranks."""
    return int((directory() / "main").read_text())


def take_stderr(name: str | int) -> None:
    """This process writes its errors to ``stderr-NAME`` from here on."""
    descriptor = os.open(directory() / f"stderr-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)


@contextmanager
def noted_error(rank: int, event: str) -> Iterator[None]:
    """Note what is raised."""
    try:
        yield
    except BaseException as error:
        note(rank, event, type=type(error).__name__, text=str(error))
        raise
