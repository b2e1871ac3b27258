"""Whatever happens to one rank, the others end soon, non-zero, and all name it, its step, and the cause."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.supervision.jobs import Job, job, kill, left_over

ENDS = {
    "SIGKILL": (-9, "died", "its process was killed by SIGKILL"),
    "segv": (-11, "died", "its process was killed by SIGSEGV"),
    "exit": (0, "died", "its process exited with code 0"),
    "sys.exit": (0, "left", "it called sys.exit(0) in the middle of the run"),
    "raise": (1, "failed", "KeyError: 'the first cause'"),
    "oom": (1, "failed", "out of memory (OOM): MemoryError: no room"),
}


def check_survivors(started: Job, failed: int, verb: str, cause: str, step: str = "step 3 (backward)") -> None:
    expected = f"ank {failed} (host host{failed}, process {started.ranks[failed].pid}) {verb} at {step}: {cause}"
    for rank in started.ranks:
        if rank.number != failed:
            assert rank.code == 1, started.text()
            assert rank.last_line.endswith(expected), (expected, started.text())


EVERYDAY = [("SIGKILL", 1), ("raise", 1)]
OFTEN = [("SIGKILL", 0), ("segv", 1), ("exit", 0), ("sys.exit", 1), ("oom", 1)]


def marks_of(kind: str, failed: int) -> list[pytest.MarkDecorator]:
    if (kind, failed) in EVERYDAY:
        return []
    return [pytest.mark.slow if (kind, failed) in OFTEN else pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("kind", "failed"),
    [pytest.param(kind, failed, marks=marks_of(kind, failed)) for kind in ENDS for failed in (0, 1)],
)
def test_all_ranks_name_the_failed_one_and_its_cause(tmp_path: Path, kind: str, failed: int) -> None:
    code, verb, cause = ENDS[kind]
    with job(tmp_path, "train", 3, fault=[failed, 3], kind=kind, meet=True) as started:
        assert started.wait(8.0) < 5.0
        assert started.ranks[failed].code == code
        check_survivors(started, failed, verb, cause)
        assert left_over(started) == []


@pytest.mark.slow
@pytest.mark.parametrize("failed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_children_of_a_killed_rank_that_hold_its_descriptors_hide_nothing(tmp_path: Path, failed: int) -> None:
    with job(tmp_path, "train", 2, fault=[failed, 3], kind="children", meet=True) as started:
        assert started.wait(8.0) < 5.0
        check_survivors(started, failed, "died", "its process was killed by SIGKILL")


@pytest.mark.slow
def test_a_rank_outside_collectives_that_cannot_be_interrupted_is_ended(tmp_path: Path) -> None:
    with job(tmp_path, "train", 2, steps=2, sleep=60, grace=1.0) as started:
        started.until("validation")
        kill(started.ranks[0].pid)
        assert 0.8 < started.wait(10.0) < 6.0
        survivor = started.ranks[1]
        assert survivor.code == 1
        assert survivor.last_line == (
            "lightning-smddp: rank 1 (host host1) at step 1 (validation) is ended, exit code 1. Cause: rank 0 (host "
            f"host0, process {started.ranks[0].pid}) died at step 1 (validation): its process was killed by SIGKILL"
        )
        assert survivor.err.count("\n") == 1
        assert survivor.values("cleaned") == [True]


@pytest.mark.slow
def test_a_rank_outside_collectives_that_runs_python_is_interrupted(tmp_path: Path) -> None:
    with job(tmp_path, "train", 2, steps=2, sleep=60, sleep_in_python=True) as started:
        started.until("validation")
        kill(started.ranks[1].pid)
        assert started.wait(10.0) < 2.5
        check_survivors(started, 1, "died", "its process was killed by SIGKILL", "step 1 (validation)")
        assert started.ranks[0].values("cleaned") == []


@pytest.mark.slow
def test_a_clean_up_that_hangs_is_left_behind(tmp_path: Path) -> None:
    with job(tmp_path, "train", 2, steps=2, sleep=60, hang_in_clean_up=True, grace=0.5) as started:
        started.until("validation")
        kill(started.ranks[0].pid)
        assert started.wait(10.0) < 7.0
        assert started.ranks[1].values("cleaned") == [True]


@pytest.mark.slow
def test_a_failed_rank_that_hangs_while_it_tidies_up_is_ended(tmp_path: Path) -> None:
    options = {"fault": [1, 3], "kind": "raise", "meet": True, "slow_teardown": [1], "grace": 1.0, "unwind": 1.5}
    with job(tmp_path, "train", 2, **options) as started:
        assert 1.3 < started.wait(15.0) < 10.0
        check_survivors(started, 1, "failed", "KeyError: 'the first cause'")
        assert started.ranks[1].code == 1
        assert "is ended, exit code 1. Cause: rank 1" in started.ranks[1].last_line
        assert "Traceback (most recent call last)" in started.ranks[1].err
        assert "KeyError: 'the first cause'\n" in started.ranks[1].err


# ---- stopped processes ----


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_stopped_rank_is_named_and_killed(tmp_path: Path, stopped: int) -> None:
    options = {"fault": [stopped, 3], "kind": "SIGSTOP", "meet": True, "collective_timeout": 1.0}
    with job(tmp_path, "train", 3, **options) as started:
        assert 0.7 < started.wait(12.0) < 1.0 + 5.0
        assert started.ranks[stopped].code == -signal.SIGKILL
        check_survivors(started, stopped, "fell silent", "nothing was heard from it for 1 s: it is stopped, or cut off")
        assert left_over(started) == []


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, "train", 2, steps=20, pause=0.05, meet=True, collective_timeout=1.0) as started:
        started.until("ready")
        for rank in started.ranks:
            kill(rank.pid, signal.SIGSTOP)
        time.sleep(1.5)
        for rank in started.ranks:
            kill(rank.pid, signal.SIGCONT)
        started.wait(10.0)
        assert [rank.code for rank in started.ranks] == [0, 0], started.text()


# ---- launchers ----

LAUNCHER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    wrapper = (sys.executable, "-c", LAUNCHER)
    with job(tmp_path, "train", 2, *wrapper, steps=1, sleep=60, sleep_in_python=True, watch_parent=True) as started:
        started.until("validation")
        kill(started.ranks[1].pid)  # the launcher
        deadline = time.monotonic() + 8.0
        while left_over(started) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left_over(started) == []
        (pid,) = started.ranks[1].values("ready")
        text = f"Rank 1 (host host1, process {pid}) died at step 0 (validation): its launcher (process "
        for rank in started.ranks:
            assert f"{text}{started.ranks[1].pid}) ended" in rank.last_line


# ---- who is late ----


def test_a_timeout_of_a_collective_is_the_late_ranks_failure(tmp_path: Path) -> None:
    options = {"steps_of": [7, 5, 7], "phase_of": ["backward", "data", "backward"], "asks": 2}
    with job(tmp_path, "late", 3, **options) as started:
        started.wait(10.0)
        text = (
            f"Rank 1 (host host1, process {started.ranks[1].pid}) did not come at step 5 (data): rank 2 (host host2) "
            "waited for it at step 7 (backward): RuntimeError: [gloo] Timed out waiting 2000ms for recv operation to "
            "complete"
        )
        assert started.ranks[2].values("error") == [["RankFailedError", text]]
        assert [rank.code for rank in started.ranks] == [1, 1, 3]
