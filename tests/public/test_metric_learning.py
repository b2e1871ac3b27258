"""Losses between rows, and conditional random fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, table

losses = pytest.importorskip("pytorch_metric_learning.losses")
miners = pytest.importorskip("pytorch_metric_learning.miners")
torchcrf = pytest.importorskip("torchcrf")
datasets = pytest.importorskip("sklearn.datasets")

pytestmark = MARKS


def digits(count: int = 48) -> list[tuple[Tensor, Tensor]]:
    found = datasets.load_digits()
    images = torch.tensor(found.data[:count], dtype=torch.float32) / 16
    return list(zip(images, torch.tensor(found.target[:count]), strict=True))


class Embedding(Learner):
    rows = 16

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def data(self) -> Any:
        return digits()


class TripletMined(Embedding):
    def build(self) -> None:
        self.miner = miners.MultiSimilarityMiner()
        self.criterion = losses.TripletMarginLoss()

    def loss(self, batch: Any) -> Tensor:
        embeddings = self.net(batch[0])
        return self.criterion(embeddings, batch[1], self.miner(embeddings, batch[1]))


class CrossBatch(Embedding):
    """Embeddings of earlier batches take part: state from batch to batch."""

    def build(self) -> None:
        self.criterion = losses.CrossBatchMemory(losses.NTXentLoss(), embedding_size=8, memory_size=64)

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_norm", self.net(batch[0]).norm(dim=1).mean())


class TaggerCrf(Embedding):
    """Its lengths are values of the batch; the loss is a mean over rows."""

    def build(self) -> None:
        self.tags = nn.Linear(16, 4)
        self.words = nn.LSTM(8, 16, batch_first=True)
        self.crf = torchcrf.CRF(4, batch_first=True)

    def loss(self, batch: Any) -> Tensor:
        hidden, _ = self.words(batch[0].view(-1, 8, 8))
        wanted = (batch[0].view(-1, 8, 8).sum(2) % 4).long()
        mask = torch.arange(8) < (3 + batch[1] % 5)[:, None]
        return -self.crf(self.tags(hidden), wanted, mask=mask, reduction="mean")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden, _ = self.words(batch[0].view(-1, 8, 8))
        paths = self.crf.decode(self.tags(hidden))
        self.log("val_tags", torch.tensor(paths).float().mean())


@table(
    Case(TripletMined, WHOLE),
    Case(CrossBatch, WHOLE),
    Case(TaggerCrf),
)
def test_metric_learning(case: Case) -> None:
    check(case)
