"""Counters and running values in attributes go on from micro-batch to micro-batch, and are the same on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, name_of, outcome

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Counting(Evaluated):
    """Hits as a tensor that grows in place, logged from the steps and at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.hits, self.rows = 0, 0

    on_validation_epoch_start = on_test_epoch_start = reset

    def note(self, batch: list[Tensor]) -> None:
        self.hits += (self.net(batch[0]).argmax(1) == batch[1]).sum()
        self.rows += len(batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(batch)

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.hits / self.rows)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note(batch)
        self.log("hits", self.hits)

    def on_test_epoch_end(self) -> None:
        self.log("rows", float(self.rows))


class Running(Counting):
    """A mean of all rows so far, of Python's numbers, logged from each step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.hits += int((logits.argmax(1) == batch[1]).sum())
        self.rows += len(batch[1])
        self.log("running", self.hits / self.rows)
        return F.cross_entropy(logits, batch[1])

    validation_step = test_step = training_step  # type: ignore[assignment]


class Averaging(Counting):
    """Changes tensors in place by what an early module makes, and does nothing else with it."""

    def reset(self) -> None:
        self.sum, self.mean = torch.zeros(()), torch.zeros(16)
        self.trained_rows = torch.zeros(())
        self.report = {"rows": self.trained_rows}  # the same tensor
        self.seen: list[tuple[float, ...]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        early = self.net[0](batch[0])
        self.sum.add_(early.detach().pow(2).mean())
        self.trained_rows.add_(len(batch[0]))
        self.mean.mul_(0.9).add_(early.detach().mean(0), alpha=0.1)
        return F.cross_entropy(self.net[1:](early), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((float(self.sum), float(self.mean.sum()), float(self.report["rows"])))

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        pass

    on_validation_epoch_end = on_validation_epoch_start = None  # type: ignore[assignment]


def counted(bench: Bench, kind: type[Counting], tests: bool = False, pipeline: Any = None) -> Any:
    """Training, with validation; what the module is left with."""
    model = kind()
    trainer = bench.trainer(pipeline, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(model)
    kept = {name: getattr(model, name) for name in ("hits", "rows", "sum", "mean", "seen") if hasattr(model, name)}
    return outcome(model, trainer, kept=kept, tests=trainer.test(model, verbose=False) if tests else None)


TWO_PARTS = {"num_microbatches": 2}
CASES: list[Case] = [
    functools.partial(counted, kind=Counting, tests=True, pipeline=TWO_PARTS),
    functools.partial(counted, kind=Running),
    functools.partial(counted, kind=Averaging, pipeline=TWO_PARTS),
]
TWO = Matrix(CASES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Any) -> None:
    TWO.compare(case)
