"""Losses between rows, ordinal regression, conditional random fields, metrics as losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, table

losses = pytest.importorskip("pytorch_metric_learning.losses")
miners = pytest.importorskip("pytorch_metric_learning.miners")
torchmetrics = pytest.importorskip("torchmetrics")
coral_losses = pytest.importorskip("coral_pytorch.losses")
coral_layers = pytest.importorskip("coral_pytorch.layers")
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


class ArcFace(Embedding):
    """The loss has weights of its own, in an optimizer of their own group."""

    def build(self) -> None:
        self.criterion = losses.ArcFaceLoss(num_classes=10, embedding_size=8, scale=8)

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net.parameters()}, {"params": self.criterion.parameters(), "lr": 0.1}]
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


class CrossBatch(Embedding):
    """Embeddings of earlier batches take part: state from batch to batch."""

    def build(self) -> None:
        self.criterion = losses.CrossBatchMemory(losses.NTXentLoss(), embedding_size=8, memory_size=64)

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_norm", self.net(batch[0]).norm(dim=1).mean())


class Coral(Embedding):
    def build(self) -> None:
        self.head = coral_layers.CoralLayer(size_in=8, num_classes=10)

    def loss(self, batch: Any) -> Tensor:
        levels = (batch[1][:, None] > torch.arange(9)).float()
        return coral_losses.coral_loss(self.head(self.net(batch[0])), levels)


class MetricsBeside(Embedding):
    """torchmetrics in collections, logged as objects."""

    def build(self) -> None:
        self.head = nn.Linear(8, 10)
        made = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.classification.MulticlassAccuracy(10),
                "f1": torchmetrics.classification.MulticlassF1Score(10),
                "ap": torchmetrics.classification.MulticlassAveragePrecision(10),
                "confusion": torchmetrics.classification.MulticlassCohenKappa(10),
            }
        )
        self.train_metrics, self.val_metrics = made.clone(prefix="train_"), made.clone(prefix="val_")

    def scores(self, batch: Any, metrics: Any) -> Tensor:
        scores = self.head(self.net(batch[0]))
        metrics(scores, batch[1])
        self.log_dict(metrics, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(scores, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scores(batch, self.train_metrics)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores(batch, self.val_metrics)


class MetricAsLoss(Embedding):
    """A metric object computes the loss."""

    def build(self) -> None:
        self.head = nn.Linear(8, 1)
        self.criterion = torchmetrics.MeanSquaredError()

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.head(self.net(batch[0]))[:, 0], batch[1].float() / 10)


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
    Case(Coral),
    Case(MetricsBeside),
    Case(MetricAsLoss, WHOLE),
    Case(TaggerCrf),
)
def test_metric_learning(case: Case) -> None:
    check(case)
