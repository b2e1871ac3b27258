"""All ranks stop at one step, or soon, whatever their training threads do."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.supervision.jobs import job, kill, left_over


@pytest.mark.parametrize(("world_size", "rounds"), [(1, 4), pytest.param(3, 10, marks=pytest.mark.slow)])
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, world_size: int, rounds: int) -> None:
    with job(tmp_path, "rounds_of_stops", world_size, rounds=rounds, seed=world_size) as started:
        started.wait(40.0)
        assert [rank.code for rank in started.ranks] == [0] * world_size, started.text()
        stops = [rank.values("stop") for rank in started.ranks]
        assert all(other == stops[0] for other in stops), started.text()
        assert [(number, agreed, signum) for number, _, agreed, signum in stops[0]] == [
            (number, True, signal.SIGTERM) for number in range(rounds)
        ]


@pytest.mark.exhaustive
def test_all_ranks_stop_at_the_same_step_many_times(tmp_path: Path) -> None:
    with job(tmp_path, "rounds_of_stops", 3, rounds=200, seed=77) as started:
        started.wait(110.0)
        stops = [rank.values("stop") for rank in started.ranks]
        assert stops[0] == stops[1] == stops[2]
        assert len(stops[0]) == 200


@pytest.mark.parametrize(("signum", "receiver"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_a_signal_to_one_rank_stops_all(tmp_path: Path, signum: int, receiver: int) -> None:
    with job(tmp_path, "train", 2, steps=10000, pause=0.002, meet=True, signals=True) as started:
        started.until("ready")
        time.sleep(0.2)
        kill(started.ranks[receiver].pid, signum)
        assert started.wait(30.0) < 10.0
        assert [rank.code for rank in started.ranks] == [128 + signum] * 2, started.text()
        (first,), (second,) = (rank.values("stop") for rank in started.ranks)
        assert first == second
        assert first[2] is True


def test_the_same_signal_to_all_ranks_at_once_is_one_request(tmp_path: Path) -> None:
    with job(tmp_path, "train", 3, steps=10000, pause=0.002, meet=True, signals=True) as started:
        started.until("ready")
        for _ in range(2):  # the terminal's, and the same passed on by the launcher
            for rank in started.ranks:
                kill(rank.pid, signal.SIGINT)
        started.wait(30.0)
        assert [rank.code for rank in started.ranks] == [130] * 3, started.text()
        assert len({tuple(rank.values("stop")[0]) for rank in started.ranks}) == 1
        assert [rank.err.count("all ranks stop at") for rank in started.ranks] == [1, 0, 0]


@pytest.mark.slow
def test_while_a_peer_is_stopped_there_is_no_agreement_and_the_grace_time_ends_all(tmp_path: Path) -> None:
    options = {"fault": [1, 3], "kind": "SIGSTOP", "meet": True, "signals": True, "stop_grace": 1.5}
    with job(tmp_path, "train", 3, **options) as started:
        started.until_stopped(1, at=3)
        kill(started.ranks[2].pid, signal.SIGTERM)
        assert 1.0 < started.wait(30.0) < 7.0
        assert [rank.code for rank in started.ranks] == [143, -9, 143], started.text()
        for number in (0, 2):
            assert started.ranks[number].last_line == (
                f"lightning-smddp: rank {number} (host host{number}) at step 3 (backward) is ended, exit code 143. "
                "Cause: it did not stop within 1.5 s of SIGTERM"
            )
            assert started.ranks[number].values("cleaned") == [False]
        assert left_over(started) == []


@pytest.mark.slow
@pytest.mark.parametrize("stop_grace", [3.0, 1.5])  # 1.5 s were over before rank 0 counted as stopped
def test_while_the_hub_is_stopped_the_grace_time_ends_all(tmp_path: Path, stop_grace: float) -> None:
    options = {"fault": [0, 3], "kind": "SIGSTOP", "meet": True, "signals": True, "stop_grace": stop_grace}
    with job(tmp_path, "train", 2, **options) as started:
        started.until_stopped(0, at=3)
        kill(started.ranks[1].pid, signal.SIGTERM)
        assert stop_grace - 0.5 < started.wait(30.0) < stop_grace + 6.0
        assert [rank.code for rank in started.ranks] == [-9, 143], started.text()


@pytest.mark.slow
def test_ranks_that_come_to_a_gate_stop_there_without_the_agreement_of_a_stopped_one(tmp_path: Path) -> None:
    options = {"fault": [1, 3], "kind": "SIGSTOP", "signals": True, "steps": 10000, "pause": 0.01, "stop_grace": 4.0}
    with job(tmp_path, "train", 2, **options) as started:
        started.until("ready")  # rank 0 handles signals from then on, which rank 1 does not wait for
        started.until_stopped(1)
        kill(started.ranks[0].pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while started.ranks[0].process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert started.ranks[0].code == 143
        ((signum, _, agreed),) = started.ranks[0].values("stop")
        assert (signum, agreed) == (signal.SIGTERM, False)
        started.wait(1.0)
        assert started.ranks[1].code == -signal.SIGKILL


@pytest.mark.slow
def test_a_second_signal_ends_a_rank_that_does_not_stop_and_so_the_others(tmp_path: Path) -> None:
    with job(tmp_path, "stop_without_gates", 2, grace=1.0) as started:
        started.until("ready")
        kill(started.ranks[1].pid, signal.SIGTERM)
        started.until_heard(0)  # by rank 1, which has heard it
        time.sleep(1.2)
        kill(started.ranks[1].pid, signal.SIGTERM)
        assert started.wait(15.0) < 6.0
        assert [rank.code for rank in started.ranks] == [143, 143], started.text()
        assert "Cause: SIGTERM came again" in started.ranks[1].last_line
        assert f"Cause: rank 1 (host host1, process {started.ranks[1].pid}) was stopped" in started.ranks[0].last_line
        assert [rank.values("cleaned") for rank in started.ranks] == [[None], [None]]
