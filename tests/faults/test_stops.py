"""The job is told to stop: a checkpoint, the right exit code, and no hang. Pairs, not all combinations."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.case import Case, exhaustive
from tests.faults.checks import BOUND_S, assert_ended, assert_saved
from tests.faults.injection import TWICE_AFTER_S, Fault
from tests.faults.jobs import Result, run

TERM, INT = 128 + signal.SIGTERM, 128 + signal.SIGINT
PP = "smddp_pipeline"
STOP_CHECKPOINT = "smddp-stop.ckpt"
VALIDATES = {"limit_val_batches": 2, "val_check_interval": 3}


def stop(kind: str, step: int, phase: str, code: int | None, everyday: bool = False, **case: Any) -> Any:
    name = f"{kind}-{step}-{phase}-{case.get('strategy', 'smddp')}-{case.get('launcher', 'script')}"
    marks = [] if everyday else [pytest.mark.slow]
    return pytest.param(code, Case([Fault(1, step, kind, phase)], save_every=3, **case), id=name, marks=marks)


@pytest.mark.parametrize(
    ("code", "case"),
    [
        stop("term", 5, "forward", TERM, everyday=True),
        stop("term", 5, "validation", TERM, strategy=PP, trainer=VALIDATES),
        stop("term", 5, "forward", None, launcher="torchrun", workers=2),  # the agent exits with a code of its own
        stop("term_group", 5, "forward", TERM, workers=2),  # as schedulers do, and torchrun to each rank's
        *exhaustive(
            stop("term", 0, "forward", TERM, strategy=PP),
            stop("term", 5, "validation", TERM, trainer=VALIDATES),
            stop("int", 5, "forward", INT),
            stop("term", 5, "comm", TERM, launcher="spawn"),
            stop("int_group", 5, "backward", INT, strategy=PP, workers=2),
            stop("int_group", 5, "optimizer", INT, launcher="spawn"),
        ),
    ],
)
def test_asked_once(code: int | None, case: Case, tmp_path: Path) -> None:
    result = run(case, tmp_path)
    assert_ended(result, code=code)
    assert_saved(result)
    assert STOP_CHECKPOINT in {path.name for path in result.checkpoints}, result.describe()
    assert len(stopped_at(result)) <= 1, result.describe()


def stopped_at(result: Result) -> set[int]:
    """The steps at which ranks stopped."""
    raised = [event for events in result.events.values() for event in events if event["event"] == "raised"]
    return {event["step"] for event in raised if event["type"] == "SIGTERMException"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code"), [("term_twice", TERM), pytest.param("int_twice", INT, marks=pytest.mark.exhaustive)]
)
def test_asked_twice(kind: str, code: int, tmp_path: Path) -> None:
    """A rank is busy for long: the second signal ends all at once."""
    busy = Case([Fault(0, 5, kind, "data")], asleep={1: 60.0}, deeply=True)
    result = run(busy, tmp_path)
    assert_ended(result, bound_s=TWICE_AFTER_S + BOUND_S, code=code)


@pytest.mark.slow
def test_while_a_rank_hangs(tmp_path: Path) -> None:
    faults = [Fault(1, 5, "hang", "forward", timed=False), Fault(0, 5, "term", "data")]
    result = run(Case(faults, PP, save_every=3, options={"stop_grace": 2.0}), tmp_path)
    assert_ended(result, bound_s=2.0 + 6.0, code=TERM)
    assert_saved(result)
