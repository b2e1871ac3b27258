"""What the user's hooks for exceptions do comes to its end, though launchers and gloo would have it otherwise."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.supervision.jobs import Job, job, kill, left_over

CAUSE = "KeyError: 'the first cause'"
# Rank 0 is the hub of the others.
FIRST = [0, pytest.param(1, marks=pytest.mark.exhaustive)]
SECOND = [pytest.param(0, marks=pytest.mark.exhaustive), 1]


def uploaded(started: Job) -> list[bool]:
    return [rank.values("uploaded") == [None] for rank in started.ranks]


@pytest.mark.slow
@pytest.mark.parametrize("fails", FIRST)
def test_ranks_that_wait_in_c_are_not_ended_before_the_hook_of_another_one(tmp_path: Path, fails: int) -> None:
    with job(tmp_path, "upload", 3, fails=fails, seconds=2.0, allowed=20.0, grace=1.0) as started:
        assert 2.0 < started.wait(20.0) < 8.5
        assert uploaded(started)[fails], started.text()
        assert [rank.code for rank in started.ranks] == [1, 1, 1], started.text()
        assert [rank.values("cleaned") for rank in started.ranks] == [[]] * 3, started.text()
        assert CAUSE in started.ranks[fails].last_line
        assert left_over(started) == []


@pytest.mark.slow
@pytest.mark.parametrize("fails", SECOND)
def test_a_hook_that_does_not_end_holds_nobody_for_longer_than_is_allowed(tmp_path: Path, fails: int) -> None:
    with job(tmp_path, "upload", 2, fails=fails, seconds=60.0, allowed=2.0, grace=0.5, unwind=1.0) as started:
        assert 1.5 < started.wait(20.0) < 10.0
        assert [rank.code for rank in started.ranks] == [1, 1], started.text()
        assert not uploaded(started)[fails]
        assert CAUSE in started.ranks[fails].err
        assert left_over(started) == []


@pytest.mark.slow
@pytest.mark.parametrize("fails", FIRST)
def test_followers_end_behind_the_hook_of_the_rank_that_failed(tmp_path: Path, fails: int) -> None:
    with job(tmp_path, "upload", 3, fails=fails, follows=True, seconds=2.0, allowed=20.0) as started:
        started.wait(30.0)
        assert uploaded(started) == [True] * 3, started.text()
        begun = [rank.values("ended")[0] for rank in started.ranks]
        assert max(begun) - min(begun) < 1.5  # those that have nothing to upload were there two seconds before


@pytest.mark.slow
@pytest.mark.parametrize("fails", SECOND)
def test_a_launcher_that_ends_all_ranks_does_not_end_a_hook(tmp_path: Path, fails: int) -> None:
    with job(tmp_path, "upload", 2, fails=fails, follows=True, seconds=1.5, allowed=20.0) as started:
        started.until("begun")
        for rank in started.ranks:
            kill(rank.pid, signal.SIGTERM)
        started.wait(30.0)
        assert uploaded(started) == [True] * 2, started.text()
        assert [rank.code for rank in started.ranks] == [1, 1], started.text()


@pytest.mark.slow
@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_and_ctrl_c_do_end_a_hook(tmp_path: Path, again: signal.Signals) -> None:
    with job(tmp_path, "upload", 2, fails=1, follows=True, seconds=30.0, allowed=40.0) as started:
        started.until("begun")
        if again == signal.SIGTERM:
            kill(started.ranks[1].pid, signal.SIGTERM)
            time.sleep(1.2)
        kill(started.ranks[1].pid, again)
        assert started.wait(15.0) < 6.0
        assert not uploaded(started)[1]
        assert started.ranks[1].code == 128 + again
        assert f"{again.name} came after this failure" in started.ranks[1].last_line
