"""Modules of the kinds that users have, in fit, validation, test and prediction: as where gradients are accumulated."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest

from tests.strategies.learning_tasks import TASKS, Task, all_steps
from tests.strategies.pipeline_learners import Bench, Case, Matrix, assert_same, name_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what is said is looked at below
# Of some kinds: how what is said of whole batches begins, each time that it is said, and what it names.
SAID = {
    "PackedInside": (["`predict_step` runs each batch as one"], "cannot be put together"),
    "Generators": ([], ""),
    "NestedRows": (["smddp_pipeline runs batches as one micro-batch"] * 3, "NestedTensor"),  # in fit, test and predict
}


def task(bench: Bench, kind: str) -> Any:
    kinds: dict[str, type[Task]] = {cls.__name__: cls for cls in TASKS}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = all_steps(bench, kinds[kind]())
    return result, [str(warning.message) for warning in seen if "micro-batch" in str(warning.message)]


# What is said of them is said of others, too; and others' outputs have rows in another place than the first.
ALSO = ("Normalised", "Speech")
CASES: list[Case] = [functools.partial(task, kind=cls.__name__) for cls in TASKS if cls.__name__ not in ALSO]
MORE_CASES: list[Case] = [functools.partial(task, kind=name) for name in ALSO]
TWO = Matrix(CASES)
MORE = Matrix(MORE_CASES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_accumulation(case: Any) -> None:
    compare(TWO, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES, ids=name_of)
def test_more_equals_accumulation(case: Any) -> None:
    compare(MORE, case)


def compare(matrix: Matrix, case: Any) -> None:
    (first, said), (second, others_said) = matrix.results(case)
    expected, _ = matrix.alone(case)
    assert_same(first, expected)
    assert_same(second, expected)
    beginnings, content = SAID.get(case.keywords["kind"], (None, ""))
    if beginnings is not None:
        assert others_said == []
        for beginning in beginnings:
            assert sum(text.startswith(beginning) for text in said) == beginnings.count(beginning), said
        assert content in " ".join(said)
