"""Losses between rows: lightly's examples, in the shape of its documentation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor, nn

from tests.public.cases import EXACT, MARKS, WHOLE, Case, Learner, check, numbers, table

lightly = pytest.importorskip("lightly")
lightly_loss = pytest.importorskip("lightly.loss")
heads = pytest.importorskip("lightly.models.modules.heads")
model_utils = pytest.importorskip("lightly.models.utils")
scheduler = pytest.importorskip("lightly.utils.scheduler")

pytestmark = MARKS

APART = {**WHOLE, "split": ["backbone_momentum"]}  # teacher and student on different ranks

WIDTH = 16


def views(count: int = 24, number: int = 2, size: int = 16) -> list[list[Tensor]]:
    images, noise = numbers(count, 3, size, size), numbers(count, number, 3, size, size, seed=1)
    return [[image + 0.3 * one for one in each] for image, each in zip(images, noise, strict=True)]


def backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, WIDTH, 3, stride=2, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class SelfSupervised(Learner):
    rate = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def data(self) -> Any:
        return views()

    val_dataloader = None  # these have no validation


class SimClr(SelfSupervised):
    def build(self) -> None:
        self.projection_head = heads.SimCLRProjectionHead(WIDTH, 16, 8)
        self.criterion = lightly_loss.NTXentLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x))

    def loss(self, batch: Any) -> Tensor:
        x0, x1 = batch
        return self.criterion(self.forward(x0), self.forward(x1))


class Byol(SelfSupervised):
    """The momentum encoder is updated inside the step, as in lightly's example."""

    def build(self) -> None:
        self.projection_head = heads.BYOLProjectionHead(WIDTH, 16, 8)
        self.prediction_head = heads.BYOLPredictionHead(8, 16, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        model_utils.deactivate_requires_grad(self.backbone_momentum)
        model_utils.deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = lightly_loss.NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        return self.prediction_head(self.projection_head(self.backbone(x)))

    def forward_momentum(self, x: Tensor) -> Tensor:
        return self.projection_head_momentum(self.backbone_momentum(x)).detach()

    def update(self) -> None:
        momentum = scheduler.cosine_schedule(self.current_epoch, 10, 0.9, 1)
        model_utils.update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        model_utils.update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)

    def similarity(self, batch: Any) -> Tensor:
        x0, x1 = batch
        p0, p1 = self.forward(x0), self.forward(x1)
        z0, z1 = self.forward_momentum(x0), self.forward_momentum(x1)
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

    def loss(self, batch: Any) -> Tensor:
        self.update()
        return self.similarity(batch)


class ByolHook(Byol):
    """The same with the update in a hook."""

    def loss(self, batch: Any) -> Tensor:
        return self.similarity(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.update()


@table(
    Case(SimClr, WHOLE, EXACT),
    Case(ByolHook, APART),
    Case(Byol, WHOLE, refused=r"SplitError: .* parameter 'backbone_momentum\S+' .*on_train_batch_end"),
)
def test_self_supervised(case: Case) -> None:
    check(case)
