"""Layouts of stages, and batches of all sizes: as in one process. All schedules: `tests/pipeline/test_engine.py`."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, name_of, outcome

# ---- schedules and layouts ----


def everything(bench: Bench, options: dict[str, Any], layers: int = 9) -> Any:
    """All four steps, before and after training; the last batch of each loader is smaller."""
    model = Evaluated(layers, count=13)
    trainer = bench.trainer(options, max_epochs=1)
    validated = trainer.validate(model, verbose=False)
    trainer.fit(model)
    result = outcome(model, trainer)
    tested = trainer.test(model, verbose=False)
    return result, validated, tested, trainer.predict(model)


def layout(schedule: str, **options: Any) -> Case:
    return functools.partial(everything, options={"schedule": schedule, **options})


def trained(bench: Bench, schedule: str, **options: Any) -> Any:
    return bench.fit(Net(9, count=13), {"schedule": schedule, **options}, max_epochs=1)


def training(schedule: str, **options: Any) -> Case:
    """Of all four steps the one that runs by the schedule; the others run alike under all of them."""
    return functools.partial(trained, schedule=schedule, **options)


def one_row_at_last(bench: Bench) -> Any:
    return bench.fit(Net(batch_size=8, count=25), max_epochs=1)


ONE = Matrix([layout("interleaved_1f1b", stages_per_rank=3), training("zbv_zero_bubble")], 1)
SPLIT = training("interleaved_1f1b", split=["net.2", "net.4", "net.13"])
TWO = Matrix([layout("zbv_zero_bubble"), SPLIT, one_row_at_last])
FOUR = Matrix([training("dualpipev")], 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE.cases, ids=name_of)
def test_one_rank(case: Case) -> None:
    ONE.compare(case)


@pytest.mark.parametrize("case", TWO.cases, ids=name_of)
def test_two_ranks(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR.cases, ids=name_of)
def test_four_ranks(case: Case) -> None:
    FOUR.compare(case)
