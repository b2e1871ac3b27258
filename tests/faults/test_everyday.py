"""Some faults of each sort, in real jobs. The other files here have the rest."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.case import Case
from tests.faults.checks import assert_ended, assert_named, assert_saved
from tests.faults.injection import MESSAGE, Fault
from tests.faults.jobs import run

IN_STEP = ["backward"]


@pytest.mark.parametrize(
    ("strategy", "rank", "asleep"),
    [
        ("smddp", 0, {}),
        pytest.param("smddp", 1, {0: 30.0}, marks=pytest.mark.slow),
        pytest.param("smddp_pipeline", 1, {}, marks=pytest.mark.slow),
        ("smddp_pipeline", 0, {1: 30.0}),
    ],
)
def test_a_killed_rank(strategy: str, rank: int, asleep: dict[int, float], tmp_path: Path) -> None:
    """While the other one waits for it in a collective, or is busy elsewhere."""
    phase = "data" if asleep else "comm"
    result = run(Case([Fault(rank, 5, "kill", phase)], strategy, asleep=asleep), tmp_path)
    assert_ended(result)
    step, phases = (4, ["data"]) if asleep else (5, IN_STEP)
    assert_named(result, rank, "killed by SIGKILL", phases, step=step)


@pytest.mark.parametrize(
    ("strategy", "rank"), [("smddp", 1), pytest.param("smddp_pipeline", 0, marks=pytest.mark.slow)]
)
def test_an_exception_is_quoted(strategy: str, rank: int, tmp_path: Path) -> None:
    result = run(Case([Fault(rank, 5, "raise", "backward")], strategy), tmp_path)
    assert_ended(result, code=1)
    assert_named(result, rank, f"ZeroDivisionError: {MESSAGE}", IN_STEP)
    assert result.errors[rank] == f"ZeroDivisionError: {MESSAGE}"


@pytest.mark.slow
def test_a_stopped_rank(tmp_path: Path) -> None:
    result = run(Case([Fault(1, 5, "stop", "forward")], timeout=3.0), tmp_path)
    assert_ended(result, bound_s=3.0 + 5.0)
    assert_named(result, 1, "nothing was heard from it for 3 s", ["forward"])


def test_told_to_stop(tmp_path: Path) -> None:
    result = run(Case([Fault(1, 5, "term", "forward")], save_every=3), tmp_path)
    assert_ended(result, code=128 + signal.SIGTERM)
    assert_saved(result, at_least=2)
    steps = {event["step"] for events in result.events.values() for event in events if event["event"] == "raised"}
    assert len(steps) == 1, result.describe()
