"""Whatever happens to one rank, the others end soon, non-zero, and all name it, its step, and the cause."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.supervision import scenarios
from tests.supervision.jobs import Job, job, kill

BOUND_S = 10.0
ENDED = "its process (ended|was killed by SIGKILL)"  # how is known until it is waited for
ENDS = {
    "exit": ("died", "its process (ended|exited with code 0)"),
    "sys.exit": ("left", r"it called sys.exit\(0\) in the middle of the run"),
    "raise": ("failed", "KeyError: 'the first cause'"),
}


def check_survivors(started: Job, failed: int, verb: str, cause: str) -> None:
    pattern = rf"ank {failed} \(host \S+, process \d+\) {verb}( at step \d+)? \(\w+\): .*{cause}"
    for rank in started.ranks:
        if rank.number != failed:
            assert rank.code == 1, started.text()
            assert re.search(pattern, rank.err), (pattern, started.text())
    assert started.left_over() == []


@pytest.mark.parametrize(
    ("kind", "failed"),
    [
        pytest.param("exit", 0, marks=pytest.mark.slow),
        pytest.param("sys.exit", 1, marks=pytest.mark.slow),
        ("raise", 0),  # T12: it serves the store, and its end is not the others' cause
    ],
)
def test_all_ranks_name_the_failed_one_and_its_cause(tmp_path: Path, kind: str, failed: int) -> None:
    with job(tmp_path, scenarios.train, 3, fails=failed, kind=kind) as started:
        started.until("ready")
        assert started.wait() < BOUND_S
        check_survivors(started, failed, *ENDS[kind])


@pytest.mark.slow
def test_children_of_a_killed_rank_0_that_hold_its_store_hide_nothing(tmp_path: Path) -> None:
    """The store's connections do not break, and nobody answers on them."""
    with job(tmp_path, scenarios.train, 2, fails=0, kind="children") as started:
        started.until("ready")
        assert started.wait() < BOUND_S
        assert re.search(rf"ank 0 .* died at step \d+ \(\w+\): {ENDED}", started.ranks[1].err), started.text()


# ---- stopped, hanging, busy ----


def test_a_stopped_rank_is_named_within_seconds_and_killed(tmp_path: Path) -> None:
    """T2: a stopped rank 0 has the store, which holds its clients. Nothing waits for the collective's own timeout."""
    with job(tmp_path, scenarios.train, 3, fails=0, kind="SIGSTOP") as started:
        started.until("ready")
        assert started.wait() < BOUND_S
        assert started.ranks[0].code == -signal.SIGKILL
        check_survivors(started, 0, "fell silent", r"its process is stopped \(by SIGSTOP")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        ("loop", "did not come"),
        ("hold the interpreter", "fell silent"),
    ],
)
def test_a_rank_that_hangs_is_named_when_the_collective_times_out(tmp_path: Path, kind: str, verb: str) -> None:
    with job(tmp_path, scenarios.train, 2, fails=1, kind=kind, gloo_timeout=2.0, collective_timeout=2.0) as started:
        started.until("ready")
        assert started.wait() < 2.0 + BOUND_S
        check_survivors(started, 1, verb, "Timed out waiting")
        assert started.ranks[1].code == (-signal.SIGKILL if verb == "fell silent" else 1)


@pytest.mark.slow
def test_a_rank_that_all_others_wait_for_says_where_it_is_once(tmp_path: Path) -> None:
    with job(tmp_path, scenarios.train, 3, fails=1, kind="sleep", note_hang_s=1.5) as started:
        deadline = time.monotonic() + 20.0
        while "all others have waited" not in started.ranks[0].err and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.5)  # in which it would be said again
        assert started.codes == [None, None, None]  # nothing is ended
        for number, times in ((0, 1), (1, 1), (2, 0)):
            text = started.ranks[number].err
            assert text.count("all others have waited for rank 1") == times, started.text()
            assert text.count("time.sleep(1000)") == times
        assert "at step 8 (forward) for 1.5 s. It is here:" in started.ranks[0].err


@pytest.mark.slow
def test_a_healthy_rank_whose_interpreter_is_held_for_long_is_left_alone(tmp_path: Path) -> None:
    """T1."""
    with job(tmp_path, scenarios.train, 2, steps=12, fails=1, kind="nap", seconds=7, collective_timeout=3.0) as started:
        started.wait(40.0)
        assert started.codes == [0, 0], started.text()


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """T4."""
    with job(tmp_path, scenarios.train, 2, steps=60, pause=0.05, collective_timeout=3.0) as started:
        started.until("ready")
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            for rank in started.ranks:
                kill(rank.pid, signum)
            time.sleep(4.5 * (signum == signal.SIGSTOP))
        started.wait(40.0)
        assert started.codes == [0, 0], started.text()


@pytest.mark.slow
def test_a_launchers_sigterm_behind_a_death_is_no_request_to_stop(tmp_path: Path) -> None:
    """T9: torchrun sends it to all ranks when one has ended."""
    with job(tmp_path, scenarios.train, 3, steps=10000, signals=True) as started:
        started.until("ready")
        kill(started.ranks[1].pid)
        for rank in (started.ranks[0], started.ranks[2]):
            kill(rank.pid, signal.SIGTERM)
        assert started.wait() < BOUND_S
        check_survivors(started, 1, "died", ENDED)


# ---- what ranks do when the store has gone ----


def test_the_store_is_not_asked_again_once_it_was_given_up(tmp_path: Path) -> None:
    """T11: a server that is stopped would hold whoever asks it, and a dead one's clients print frames of C++."""
    with job(tmp_path, scenarios.silent_store, 1, collective_timeout=3.0) as started:
        started.wait()
        assert started.ranks[0].values("asked") == [0], started.text()
        assert started.ranks[0].values("kind") == ["fell silent"]


def test_an_error_waits_for_the_failure_that_comes_behind_the_loss_of_the_store(tmp_path: Path) -> None:
    """T10: else it would go on without a name."""
    with job(tmp_path, scenarios.failure_behind_the_loss, 1) as started:
        started.wait()
        assert started.ranks[0].values("error") == ["Rank 1 (host b, process 2) died at step 7 (data): it was killed"]
