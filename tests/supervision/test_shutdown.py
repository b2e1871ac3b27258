"""How a process is ended."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from lightning_smddp.supervision.stop import Shutdown
from tests.supervision.jobs import Rank, run


@pytest.mark.parametrize("error", [None, ValueError("bad")])
def test_a_process_is_ended_where_nothing_can_be_said(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the pipe any more. An OSError came before ``os._exit``: the process went on, unwatched."""
    codes: list[int] = []

    def broken(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", codes.append)
        patch.setattr(os, "write", broken)
        shutdown = Shutdown()
        if error is not None:
            shutdown.take_over(error)
        shutdown.force(143, "rank 0", "it did not stop")
    assert codes == [143]


def test_what_a_stream_of_the_users_holds_is_written_before_a_forced_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "stderr", None)  # closed, as in a service
    shutdown = Shutdown()
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        print("last line")
        shutdown.force(1, "rank 1", "rank 0 died")
        assert (tmp_path / "out").read_text() == "last line\n"


def test_children_end_with_a_process_that_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,), daemon=True)
    child.start()
    Shutdown().force(1, "rank 1", "rank 0 died")
    child.join(5.0)
    assert child.exitcode == -signal.SIGKILL


def test_clean_ups_run_before_a_forced_end_and_one_that_hangs_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    shutdown, cleaned, hung = Shutdown(), threading.Event(), threading.Event()
    shutdown.clean_ups += [cleaned.set, hung.wait]
    begin = time.monotonic()
    shutdown.force(1, "rank 1 (host a) at step 3 (backward)", "rank 0 died")
    assert cleaned.is_set()
    assert time.monotonic() - begin < 20.0
    hung.set()
    text = capfd.readouterr().err
    line = "lightning-smddp: rank 1 (host a) at step 3 (backward) is ended, exit code 1. Cause: rank 0 died\n"
    assert text.endswith(line)
    assert "test_clean_ups_run" in text  # where its threads are


# ---- hooks for exceptions ----


def upload(seconds: float, allowed: float, signum: int, rank: Rank) -> None:
    """``signum`` comes meanwhile, SIGINT twice; 0: none."""
    error = KeyError("the first cause")
    rank.supervisor.explain(error)
    rank.supervisor.shutdown.take_over(error, allowed)
    for number in range(2 if signum == signal.SIGINT else 1 if signum else 0):
        threading.Timer(1.0 + 2.0 * number, os.kill, [os.getpid(), signum]).start()
    time.sleep(seconds)
    (rank.directory / "uploaded").touch()
    raise error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "allowed", "signum", "cause"),
    [
        (10.0, 30.0, signal.SIGTERM, ""),  # as a launcher sends it to all behind a failure
        (60.0, 9.0, 0, "Cause: Rank 0"),
        (30.0, 40.0, signal.SIGINT, "SIGINT came again"),
    ],
    ids=["a launcher's SIGTERM", "too long", "Ctrl+C twice"],
)
def test_a_hook_has_its_time(seconds: float, allowed: float, signum: int, cause: str, tmp_path: Path) -> None:
    """It comes to its end on the rank that failed, though launchers would end it."""
    ended = run(partial(upload, seconds, allowed, signum), 1, tmp_path)
    assert (tmp_path / "uploaded").exists() == (cause == "")
    assert "KeyError: 'the first cause'" in ended.said(0)
    assert cause in ended.written[0]
