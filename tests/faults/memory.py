"""A memory cgroup with a small limit, in which the kernel kills."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LIMIT_BYTES = 32 * 2**20
_NOTE = "cgroup"  # in the job's directory: where the cgroup is
_VERSIONS = [  # file system, file of the limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
]


def enter_cgroup(job: Path) -> None:
    """Move this process into a new one, which :func:`remove_cgroup` removes when it has ended."""
    name, file = _made(f"faults-{os.getpid()}-{job.name}")
    (job / _NOTE).write_text(str(name))
    (name / file).write_text(str(LIMIT_BYTES))
    for more in ("memory.memsw.limit_in_bytes", "memory.swap.max"):  # where there is swap at all
        with contextlib.suppress(OSError):
            (name / more).write_text(str(LIMIT_BYTES if "memsw" in more else 0))
    (name / "cgroup.procs").write_text(str(os.getpid()))


def remove_cgroup(job: Path) -> None:
    """After the end of the job of this directory, if it had one."""
    note = job / _NOTE
    if note.exists():
        Path(note.read_text()).rmdir()


def no_cgroups() -> str | None:
    """Why there can be no memory cgroup here, or None."""
    try:
        path, _ = _made(f"faults-{os.getpid()}-probe")
    except OSError as error:
        return str(error)
    path.rmdir()
    return None


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
