"""A training step that returns None: that micro-batch does not count; if all do, the batch is skipped."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from torch import Tensor

from tests.strategies.pipeline_learners import Bench, Matrix, Net, name_of


class Sometimes(Net):
    """None for micro-batches by their rows, behind the modules, or before them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_train_batch_end(self, *args: Any) -> None:
        """Without the loss, which a skipped batch has not."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.where == "batch before" and batch_idx == 1:
            return None
        loss = self.loss(batch)
        if self.where == "first batch" and batch_idx == 0:
            return None
        if self.where == "some" and batch_idx in (0, 2) and bool(batch[0][0, 0] > 0):
            return None
        return loss


def skipping(bench: Bench, where: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned `None`")
        return bench.fit(Sometimes(where), max_epochs=1)


CASES = [functools.partial(skipping, where=where) for where in ("batch before", "first batch", "some")]
TWO = Matrix(CASES, pipeline={"num_microbatches": 4, "collective_timeout": 20}, timeout=90.0)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_step_that_returns_none_is_skipped(case: Any) -> None:
    TWO.compare(case)
