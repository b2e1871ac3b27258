"""What a look at a process, and at beats tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from lightning_smddp.supervision.board import Beat, behind, may_follow
from lightning_smddp.supervision.processes import Process


def process_of(pid: int) -> Process:
    with open(f"/proc/{pid}/stat") as stat:
        start = stat.read().rpartition(")")[2].split()[19]
    return Process.own()._replace(pid=pid, start=start)


def until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5.0
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL, which the kernel sends, too,"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("raise SystemExit(3)", "exited with code 3"),
    ],
)
def test_how_a_process_ended_is_known_until_it_is_waited_for(code: str, text: str) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", f"input(); {code}"], stdin=subprocess.PIPE)
    process = process_of(child.pid)
    assert process.look() == (False, "")
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    until(lambda: process.look()[1])
    assert text in process.look()[1]
    child.communicate()
    assert process.look() == (False, "its process ended")
    process.kill()  # of no effect


def test_a_stopped_process_is_seen_and_killed_and_a_later_one_is_another() -> None:
    child = subprocess.Popen(["sleep", "30"])
    process = process_of(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: process.look()[0])
    assert process.look() == (True, "")
    assert process._replace(start="1").look() == (False, "its process ended")
    process._replace(start="1").kill()
    assert process.look() == (True, "")
    process.kill()
    assert child.wait(5.0) == -signal.SIGKILL


def beat(step: int, phase: str, waited_s: float = 0.0) -> Beat:
    return Beat(step=step, phase=phase, waited_s=waited_s)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("the user's own"), False),
        (ValueError("gloo"), False),
    ],
)
def test_errors_that_may_follow_from_another_ranks(error: Exception, expected: bool) -> None:
    assert may_follow(error) == expected


@pytest.mark.parametrize(
    ("beats", "late"),
    [
        ([beat(5, "forward", 9.0), beat(5, "forward"), beat(5, "forward", 9.0)], 1),  # a stage
        ([beat(5, "forward"), beat(5, "backward"), beat(4, "data")], 2),
        ([beat(5, "backward", 9.0), beat(4, "data", 9.0)], 1),
        ([beat(5, "backward", 9.0), beat(5, "backward", 9.0)], None),
        ([beat(9, "test", 9.0), beat(9, "checkpoint", 9.0)], 1),
    ],
)
def test_who_is_behind(beats: list[Beat], late: int | None) -> None:
    assert behind(beats) == late
