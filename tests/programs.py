"""Programs as users run them, with a launcher or without, in some seconds less: see ``tests.warm``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import warm
from tests.leaks import descendants
from tests.rank_processes import forked, kill_session

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_program(
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 110.0,
    spawned: bool = True,
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run([sys.executable, *command], cwd=directory, capture_output=True)`` gives.

    Args:
        command: ``[SCRIPT, ARGUMENTS...]`` or ``["-m", MODULE, ARGUMENTS...]``.
        directory: to run in; ``.stdout`` and ``.stderr`` in it keep what was printed.
        environment: beside this process's own; the package can be imported from everywhere.
        timeout: seconds, after which all processes of the program are killed.
        spawned: whether what ``multiprocessing`` spawns is an interpreter of its own.
    """
    files = [directory / f".{name}" for name in ("stdout", "stderr")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    places = [str(file) for file in files]
    process = forked(_program_main, [sys.executable, *command], str(directory), variables, places, spawned)
    try:
        deadline = time.monotonic() + timeout
        process.join(timeout)
        code = process.exitcode
        while any(one.session == process.pid for one in descendants()) and time.monotonic() < deadline:
            time.sleep(0.05)  # the other ranks of a script end a little later
    finally:
        left = kill_session(process)
    output, errors = (path.read_text() for path in files)
    if code is None:
        raise subprocess.TimeoutExpired(list(command), timeout, output, errors)
    assert not left, f"{command} left behind: {', '.join(left)}"
    return subprocess.CompletedProcess(list(command), code, output, errors)


def _program_main(
    command: list[str], directory: str, environment: dict[str, str], files: list[str], spawned: bool
) -> None:
    os.setsid()
    os.chdir(directory)
    for target, name in ((0, os.devnull), (1, files[0]), (2, files[1])):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if target else 0), 0o600)
        os.dup2(descriptor, target)
        os.close(descriptor)
    warm.fork_programs()
    if not spawned:
        warm.fork_spawned()
    warm.become(command, environment)
