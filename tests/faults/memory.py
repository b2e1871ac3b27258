"""A memory cgroup with a small limit, in which the kernel kills."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LIMIT_BYTES = 32 * 2**20
_NOTE = "cgroup"  # in the job's directory: where the cgroup is
_VERSIONS = [  # file system, file of the limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
]


def enter_cgroup(job: Path) -> None:
    """Move this process into a new one, which :func:`remove_cgroup` removes when it has ended."""
    name = _limited(f"faults-{os.getpid()}-{job.name}", LIMIT_BYTES)
    (job / _NOTE).write_text(str(name))
    join(name)


def remove_cgroup(job: Path) -> None:
    """After the end of the job of this directory, if it had one."""
    note = job / _NOTE
    if note.exists():
        Path(note.read_text()).rmdir()


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Path]:
    """A new one of ``limit`` bytes, for processes that :func:`join` it and end before it does."""
    name = _limited(f"limited-{os.getpid()}", limit)
    try:
        yield name
    finally:
        name.rmdir()


def join(name: Path) -> None:
    """Move this process into it."""
    (name / "cgroup.procs").write_text(str(os.getpid()))


def no_cgroups() -> str | None:
    """Why there can be no memory cgroup here, or None."""
    try:
        path, _ = _made(f"faults-{os.getpid()}-probe")
    except OSError as error:
        return str(error)
    path.rmdir()
    return None


def _limited(name: str, limit: int) -> Path:
    path, file = _made(name)
    (path / file).write_text(str(limit))
    for more in ("memory.memsw.limit_in_bytes", "memory.swap.max"):  # where there is swap at all
        with contextlib.suppress(OSError):
            (path / more).write_text(str(limit if "memsw" in more else 0))
    return path


def _made(name: str) -> tuple[Path, str]:
    reasons = []
    for root, file in _VERSIONS:
        path = root / name
        try:
            path.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        if os.access(path / file, os.W_OK):
            return path, file
        path.rmdir()
        reasons.append(f"{root} has no {file}")
    raise OSError("; ".join(reasons))
