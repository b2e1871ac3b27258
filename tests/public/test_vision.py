"""Image classifiers, with mixup, and pairs of images and texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.public.cases import MARKS, REPLICAS, WHOLE, ZERO_BUBBLE, Built, Case, Learner, check, integers, table

timm = pytest.importorskip("timm")
timm_losses = pytest.importorskip("timm.loss")
transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")
open_clip = pytest.importorskip("open_clip")
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


class OpenClip(Learner):
    """Image and text towers; the loss compares all rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
        text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2}
        self.model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
        self.criterion = open_clip.ClipLoss()

    def loss(self, batch: Any) -> Tensor:
        images, texts = batch
        return self.criterion(*self.model(images, texts))

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, 2.6)

    def data(self) -> Any:
        texts = integers(1, 50, 24, 8, seed=3)
        return [(image, text) for (image, _), text in zip(digits(), texts, strict=True)]


@table(
    Case(TimmVit, REPLICAS, ranks=4, variant="replicas"),
    Case(TimmSwin, ZERO_BUBBLE, variant="zero_bubble"),
    Case(TimmMixup, WHOLE),
    Case(OpenClip, WHOLE),
)
def test_vision(case: Case) -> None:
    check(case)
