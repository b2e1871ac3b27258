"""What the user's hooks for exceptions do comes to its end, though launchers and gloo would have it otherwise."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.supervision import scenarios
from tests.supervision.jobs import Job, job, kill

pytestmark = pytest.mark.slow
CAUSE = "KeyError: 'the first cause'"


def uploaded(started: Job) -> list[bool]:
    return [rank.values("uploaded") == [None] for rank in started.ranks]


def test_ranks_that_wait_in_c_are_not_ended_before_the_hook_of_another_one(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.upload, 3, fails=0, seconds=5.0, allowed=30.0) as started:
        assert 5.0 < started.wait(30.0) < 18.0
        assert uploaded(started)[0], started.text()
        assert started.codes == [1, 1, 1], started.text()
        assert CAUSE in started.ranks[0].err
        assert started.left_over() == []


def test_a_hook_that_does_not_end_holds_nobody_for_longer_than_is_allowed(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.upload, 2, fails=0, seconds=60.0, allowed=2.0) as started:
        assert started.wait(30.0) < 14.0
        assert started.codes == [1, 1], started.text()
        assert not uploaded(started)[0]
        assert CAUSE in started.ranks[0].err


def test_followers_end_behind_the_hook_of_the_rank_that_failed(tmp_path: Path) -> None:
    """Also where a launcher sends SIGTERM to all."""
    with job(tmp_path, scenarios.upload, 3, fails=1, follows=True, seconds=3.0, allowed=20.0) as started:
        started.until("begun")
        for rank in started.ranks:
            kill(rank.pid, signal.SIGTERM)
        started.wait(30.0)
        assert uploaded(started) == [True] * 3, started.text()
        assert started.codes == [1, 1, 1], started.text()
        ended = [rank.values("ended")[0] for rank in started.ranks]
        assert max(ended) - min(ended) < 2.5  # those that have nothing to upload were there three seconds before


def test_ctrl_c_does_end_a_hook(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.upload, 2, fails=1, follows=True, seconds=30.0, allowed=40.0) as started:
        started.until("begun")
        kill(started.ranks[1].pid, signal.SIGINT)
        assert started.wait(20.0) < 12.0
        assert not uploaded(started)[1]
        assert started.ranks[1].code == 128 + signal.SIGINT
        assert "SIGINT came after this failure" in started.ranks[1].err
