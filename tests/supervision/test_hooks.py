"""What a user's hook for exceptions does comes to its end on the rank that failed, though launchers would end it."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.supervision.jobs import Rank, run


def upload(seconds: float, allowed: float, signum: int, rank: Rank) -> None:
    """``signum`` comes meanwhile; 0: none."""
    error = KeyError("the first cause")
    rank.supervisor.explain(error)
    rank.supervisor.shutdown.postpone(allowed)
    if signum:
        threading.Timer(1.0, os.kill, [os.getpid(), signum]).start()
    time.sleep(seconds)
    (rank.directory / "uploaded").touch()
    raise error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "allowed", "signum", "cause"),
    [
        (10.0, 30.0, signal.SIGTERM, ""),  # as a launcher sends it to all behind a failure
        (60.0, 9.0, 0, "Cause: rank 0"),
        (30.0, 40.0, signal.SIGINT, "SIGINT came after this failure"),
    ],
    ids=["a launcher's SIGTERM", "too long", "Ctrl+C"],
)
def test_a_hook_has_its_time(seconds: float, allowed: float, signum: int, cause: str, tmp_path: Path) -> None:
    ended = run(partial(upload, seconds, allowed, signum), 1, tmp_path)
    assert (tmp_path / "uploaded").exists() == (cause == "")
    assert "KeyError: 'the first cause'" in ended.said(0)
    assert cause in ended.written[0]
