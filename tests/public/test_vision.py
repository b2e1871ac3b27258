"""Image classifiers, with mixup."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.public.cases import MARKS, REPLICAS, WHOLE, ZERO_BUBBLE, Built, Case, check, table

timm = pytest.importorskip("timm")
timm_losses = pytest.importorskip("timm.loss")
datasets = pytest.importorskip("sklearn.datasets")

pytestmark = MARKS

CLASSES = 10


def digits(count: int = 24, size: int = 32, channels: int = 3) -> list[tuple[Tensor, Tensor]]:
    """scikit-learn's, enlarged."""
    found = datasets.load_digits()
    images = torch.tensor(found.images[:count], dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, channels, -1, -1).contiguous()
    return list(zip(images, torch.tensor(found.target[:count]), strict=True))


class Classifier(Built):
    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def data(self) -> Any:
        return digits()


class TimmVit(Classifier):
    def build(self) -> Any:
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
        return timm.models.VisionTransformer(**sizes, num_classes=CLASSES)


class TimmSwin(Classifier):
    def build(self) -> Any:
        sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
        return timm.models.SwinTransformer(
            **sizes, depths=(2, 2), num_heads=(2, 2), num_classes=CLASSES, drop_path_rate=0.0
        )


class TimmMixup(TimmVit):
    """timm's own mixup, which draws numpy's random numbers, in the step as its training script has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES)
        self.criterion = timm_losses.SoftTargetCrossEntropy()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = self.mixup(*batch)
        return self.criterion(self.model(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self.model(images).argmax(1) == labels).float().mean())


@table(
    Case(TimmVit, REPLICAS, ranks=4, variant="replicas"),
    Case(TimmSwin, ZERO_BUBBLE, variant="zero_bubble"),
    Case(TimmMixup, WHOLE),
)
def test_vision(case: Case) -> None:
    check(case)
