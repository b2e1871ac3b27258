"""What the user's hooks for exceptions do comes to its end, though launchers and gloo would have it otherwise."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.supervision.jobs import Rank, run

pytestmark = pytest.mark.slow
CAUSE = "KeyError: 'the first cause'"


def upload(seconds: float, allowed: float, follows: bool, signum: int, rank: Rank) -> None:
    """Rank 0 is in a hook for ``seconds``; the others wait for its process in C, as in gloo, or follow it.

    ``signum`` comes to each meanwhile; 0: none.
    """
    watching = rank.supervisor
    watching.shutdown.hooks_s = allowed
    with open(rank.directory / "connection", "a") as connection:
        if rank.rank == 0:
            fcntl.flock(connection, fcntl.LOCK_EX)
        rank.store.add("connected", 1)
        while rank.store.add("connected", 0) < rank.world_size:
            time.sleep(0.01)
        if rank.rank > 0 and follows:
            watching._wait(lambda: False, 20.0)
        elif rank.rank > 0:
            fcntl.flock(connection, fcntl.LOCK_EX)
        error: Any = KeyError("the first cause")
        watching.explain(error)
        watching.shutdown.postpone(allowed)
        if signum:
            threading.Timer(1.0, os.kill, [os.getpid(), signum]).start()
        if rank.rank == 0:
            time.sleep(seconds)
        (rank.directory / f"{rank.rank} uploaded").touch()
        watching.await_first(allowed)
        (rank.directory / f"{rank.rank} ended").write_text(str(time.time()))
        raise error


def uploaded(directory: Path) -> list[str]:
    return sorted(path.name[0] for path in directory.glob("* uploaded"))


def test_ranks_that_wait_in_c_are_not_ended_before_the_hook_of_another_one(tmp_path: Path) -> None:
    ended = run(partial(upload, 5.0, 30.0, False, 0), 3, tmp_path)
    assert "0" in uploaded(tmp_path)
    assert CAUSE in ended.said(0)


def test_a_hook_that_does_not_end_holds_nobody_for_longer_than_is_allowed(tmp_path: Path) -> None:
    ended = run(partial(upload, 60.0, 2.0, False, 0), 2, tmp_path)
    assert uploaded(tmp_path) == []
    assert CAUSE in ended.written[0]


def test_followers_end_behind_the_hook_of_the_rank_that_failed(tmp_path: Path) -> None:
    """Also where a launcher sends SIGTERM to all."""
    run(partial(upload, 3.0, 20.0, True, signal.SIGTERM), 3, tmp_path)
    assert uploaded(tmp_path) == ["0", "1", "2"]
    ended = [float((tmp_path / f"{rank} ended").read_text()) for rank in range(3)]
    assert min(ended) == ended[0]  # the others had nothing to upload


def test_ctrl_c_does_end_a_hook(tmp_path: Path) -> None:
    ended = run(partial(upload, 30.0, 40.0, True, signal.SIGINT), 2, tmp_path)
    assert "0" not in uploaded(tmp_path)
    assert f"exited with code {128 + signal.SIGINT}" in ended.ends[0]
    assert "SIGINT came after this failure" in ended.written[0]
