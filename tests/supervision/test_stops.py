"""All ranks stop at one step, or soon, whatever their training threads do."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.supervision import scenarios
from tests.supervision.jobs import job, kill


@pytest.mark.parametrize(
    ("world_size", "rounds"),
    [(1, 1), pytest.param(3, 4, marks=pytest.mark.slow), pytest.param(3, 40, marks=pytest.mark.exhaustive)],
)
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, world_size: int, rounds: int) -> None:
    with job(tmp_path, scenarios.rounds_of_stops, world_size, rounds=rounds) as started:
        started.wait(20.0 + 3 * rounds)
        assert started.codes == [0] * world_size, started.text()
        stops = [rank.values("stop") for rank in started.ranks]
        assert all(other == stops[0] for other in stops), started.text()
        assert [number for number, _ in stops[0]] == list(range(rounds))


@pytest.mark.parametrize(
    ("signum", "receivers"),
    [pytest.param(signal.SIGTERM, [1], marks=pytest.mark.slow), (signal.SIGINT, [0, 1, 2])],
)
def test_signals_to_one_rank_or_all_stop_all(tmp_path: Path, signum: int, receivers: list[int]) -> None:
    with job(tmp_path, scenarios.train, 3, steps=100000, signals=True) as started:
        started.until("ready")
        for _ in range(2):  # the terminal's, and the same passed on by the launcher
            for number in receivers:
                kill(started.ranks[number].pid, signum)
        assert started.wait() < 8.0
        assert started.codes == [128 + signum] * 3, started.text()
        stops = [rank.values("stop") for rank in started.ranks]
        assert stops[0] == stops[1] == stops[2] != []
        assert [rank.err.count("all ranks stop at") for rank in started.ranks] == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0.3, 0.6, 0.9])
def test_signals_within_a_second_are_one(tmp_path: Path, wait_s: float) -> None:
    with job(tmp_path, scenarios.train, 2, steps=100000, pause=3.0, signals=True) as started:
        started.until("ready")
        time.sleep(wait_s)
        kill(started.ranks[0].pid, signal.SIGTERM)
        time.sleep(0.9)
        kill(started.ranks[0].pid, signal.SIGTERM)
        started.wait()
        assert started.codes == [143, 143], started.text()
        assert "came again" not in started.text()
        stops = [rank.values("stop") for rank in started.ranks]
        assert stops[0] == stops[1] != []


def test_a_signal_is_heard_where_somebody_took_the_wakeup_descriptor(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.replaced_wakeup, 1) as started:
        started.wait()
        assert started.codes == [0], started.text()
        (seconds,) = started.ranks[0].values("stopped")
        assert seconds < 10.0  # and not the grace time, at each step


@pytest.mark.slow
def test_a_rank_that_has_ended_its_run_need_not_answer(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.stop_behind_others, 2) as started:
        assert started.wait() < 15.0
        assert started.codes == [0, 0], started.text()
        assert started.ranks[0].values("stops")[0][1:] == [True, True]


@pytest.mark.slow
def test_a_rank_that_hangs_is_not_waited_for_longer_than_the_grace_time(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.train, 2, fails=1, kind="sleep", steps=1000, signals=True, stop_grace=3.0) as started:
        started.until("ready")
        time.sleep(2.5)
        kill(started.ranks[0].pid, signal.SIGTERM)
        assert 2.0 < started.wait() < 10.0
        assert started.codes == [143, 143]
        assert "it did not stop within 3 s of SIGTERM" in started.ranks[0].err
        assert started.left_over() == []


@pytest.mark.slow
def test_a_rank_that_does_not_answer_a_request_to_stop_has_failed(tmp_path: Path) -> None:
    options = {"fails": 1, "kind": "hold the interpreter", "steps": 1000, "signals": True, "stop_grace": 8.0}
    with job(tmp_path, scenarios.train, 2, **options) as started:
        started.until("ready")
        time.sleep(2.5)
        kill(started.ranks[0].pid, signal.SIGTERM)
        assert 2.0 < started.wait() < 10.0
        assert started.codes == [1, -signal.SIGKILL]
        text = r"Rank 1 .* fell silent .* it did not say within 2 s of SIGTERM where it can stop, and runs no Python"
        assert re.search(text, started.ranks[0].err), started.text()
        assert started.left_over() == []


@pytest.mark.slow
def test_a_second_signal_ends_a_rank_that_does_not_stop_and_so_the_others(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.stop_without_gates, 2) as started:
        started.until("ready")
        kill(started.ranks[1].pid, signal.SIGTERM)
        time.sleep(1.8)
        kill(started.ranks[1].pid, signal.SIGTERM)
        assert started.wait() < 8.0
        assert started.codes == [143, 143], started.text()
        assert "Cause: SIGTERM came again" in started.ranks[1].err
        assert "Cause: rank 1" in started.ranks[0].err
