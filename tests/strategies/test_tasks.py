"""Modules of kinds that users have, in fit, validation, test and prediction: as where gradients are accumulated."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from tests.strategies.learners import samples
from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, assert_same, outcome

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what is said is looked at below
ROWS, BATCH = 10, 6


class Task(Net):
    """A small classifier of ten rows; ``accumulation`` is what one process is told of micro-batches."""

    epochs = 1
    accumulation: Mapping[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.build()

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def collate(self, rows: list[Any]) -> Any:
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def data(self) -> list[Any]:
        return list(samples(ROWS))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=BATCH)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=BATCH)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), batch_size=BATCH)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def train_dataloader(self) -> Any:
        return DataLoader(self.data(), batch_size=BATCH, collate_fn=self.collate)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class PackedInside(Task):
    """Rows of any length, packed in the step; what is predicted is as long as the longest row of the batch."""

    def build(self) -> None:
        del self.net
        self.first, self.rnn, self.head = nn.Linear(4, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)

    def data(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        return [(torch.randn(1 + row % 5, 4, generator=generator), torch.tensor(row % 3)) for row in range(ROWS)]

    def collate(self, rows: list[Any]) -> Any:
        lengths = torch.tensor([len(x) for x, _ in rows])
        return pad_sequence([x for x, _ in rows], batch_first=True), lengths, torch.stack([y for _, y in rows])

    def run(self, batch: Any) -> Any:
        packed = pack_padded_sequence(self.first(batch[0]), batch[1], batch_first=True, enforce_sorted=False)
        return self.rnn(packed)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.run(batch)[1][-1]), batch[2])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(pad_packed_sequence(self.run(batch)[0], batch_first=True)[0])


class MemoryBank(Task):
    """Anomaly detection: training collects features for the distances of later rows; its loss trains nothing."""

    epochs = 2

    def build(self) -> None:
        del self.net
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)
        self.requires_grad_(False)
        self.kept: list[Tensor] = []
        self.bank = torch.zeros(1, 4)

    def features(self, batch: Any) -> Tensor:
        return self.second(self.first(batch[0]).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(self.features(batch))
        return torch.zeros((), requires_grad=True)

    def on_validation_epoch_start(self) -> None:
        if self.kept:
            self.bank = torch.cat(self.kept)

    def loss(self, batch: Any) -> Tensor:
        return torch.cdist(self.features(batch), self.bank).amin(1).max()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.cdist(self.features(batch), self.bank).amin(1)

    def configure_optimizers(self) -> None:
        return None


class Unfreezing(Task):
    """Its BatchNorm is in evaluation mode in the first epoch; where it trains, so few rows are not cut."""

    epochs = 2

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        self.accumulation = {"num_microbatches": self.parts}

    def parts(self, rows: int) -> int:
        return 1 if self.net[1].training else rows

    def on_train_epoch_start(self) -> None:
        self.net[1].train(self.current_epoch > 0)


class Generators(Task):
    """A batch that can be run through once."""

    def build(self) -> None:
        super().build()
        self.accumulation = {"num_microbatches": BATCH, "split_batch": self.parts_of}

    def parts_of(self, batch: Any, num_microbatches: int) -> list[Any]:
        return [([row], 1) for row in batch]

    def collate(self, rows: list[Any]) -> Any:
        return (row for row in rows)

    def stacked(self, batch: Any) -> Any:
        return tuple(torch.stack(column) for column in zip(*batch, strict=True))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(self.stacked(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.stacked(batch)[0])


# With how what is said of whole batches begins, each time that it is said, and what it names.
KINDS: dict[type[Task], tuple[list[str], str]] = {
    PackedInside: (["`predict_step` runs each batch as one"], "cannot be put together"),
    MemoryBank: ([], ""),
    Unfreezing: ([], ""),
    Generators: ([], ""),
}


def task(bench: Bench, kind: type[Task]) -> Any:
    """What training, validation, test and prediction give, and what is said of micro-batches."""
    model = kind()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = bench.trainer(None, model.accumulation, max_epochs=model.epochs, num_sanity_val_steps=0)
        trainer.fit(model)
        result = outcome(model, trainer), trainer.test(model, verbose=False), predicted(bench, trainer, model)
    return result, [str(warning.message) for warning in seen if "micro-batch" in str(warning.message)]


def predicted(bench: Bench, trainer: Trainer, model: Task) -> Any:
    """Whole batches' where those of micro-batches cannot be put together: a pipeline then runs whole ones itself."""
    try:
        return trainer.predict(model)
    except ValueError as error:
        if bench.accumulation is None or "for micro-batches of" not in str(error):
            raise
        return Bench().trainer().predict(model)


CASES: list[Case] = [functools.partial(task, kind=kind) for kind in KINDS]
TWO = Matrix(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.keywords["kind"].__name__)
def test_equals_accumulation(case: Any) -> None:
    (first, said), (second, others_said) = TWO.results(case)
    expected, _ = TWO.alone(case)
    assert_same(first, expected)
    assert_same(second, expected)
    beginnings, content = KINDS[case.keywords["kind"]]
    assert others_said == []
    for beginning in beginnings:
        assert sum(text.startswith(beginning) for text in said) == beginnings.count(beginning), said
    assert content in " ".join(said)
