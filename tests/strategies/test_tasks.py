"""Modules of kinds that users have, in fit, test and prediction: as where gradients are accumulated."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`:UserWarning"),
]
ROWS, BATCH = 10, 6


class Task(Net):
    """Of ten rows; ``accumulation`` is what one process is told of micro-batches."""

    epochs = 2
    accumulation: Mapping[str, Any] = {}

    def __init__(self) -> None:
        super().__init__(layers=3, batch_size=BATCH, count=ROWS)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=BATCH)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), batch_size=BATCH)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


class MemoryBank(Task):
    """Anomaly detection: training collects features for the distances of later rows; its loss trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.kept: list[Tensor] = []
        self.bank = torch.zeros(1, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(self.net(batch[0]))
        return torch.zeros((), requires_grad=True)

    def on_validation_epoch_start(self) -> None:
        if self.kept:
            self.bank = torch.cat(self.kept)

    def loss(self, batch: Any) -> Tensor:
        return self.predict_step(batch, 0).max()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.cdist(self.net(batch[0]), self.bank).amin(1)

    def configure_optimizers(self) -> None:
        return None


class Unfreezing(Task):
    """Its BatchNorm is in evaluation mode in the first epoch; where it trains, so few rows are not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.BatchNorm1d(16)
        self.accumulation = {"num_microbatches": lambda rows: 1 if self.net[1].training else rows}

    def on_train_epoch_start(self) -> None:
        self.net[1].train(self.current_epoch > 0)


class Generators(Task):
    """A batch that can be run through once."""

    accumulation: Mapping[str, Any] = {
        "num_microbatches": BATCH,
        "split_batch": lambda batch, _: [([x], 1) for x in batch],
    }

    def loss(self, batch: Any) -> Tensor:
        return super().loss([torch.stack(column) for column in zip(*batch, strict=True)])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(torch.stack([x for x, _ in batch]))

    def train_dataloader(self) -> Any:
        return DataLoader(samples(ROWS), batch_size=BATCH, collate_fn=lambda rows: (row for row in rows))


def task(bench: Bench, kind: type[Task]) -> Any:
    """What training with validation, test and prediction give."""
    model = kind()
    trainer = bench.trainer(None, model.accumulation, max_epochs=model.epochs, num_sanity_val_steps=0)
    trainer.fit(model)
    return outcome(model, trainer), trainer.test(model, verbose=False), trainer.predict(model)


CASES: list[Case] = [functools.partial(task, kind=kind) for kind in (MemoryBank, Unfreezing, Generators)]
TWO = Matrix(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.keywords["kind"].__name__)
def test_equals_accumulation(case: Any) -> None:
    TWO.compare(case)
