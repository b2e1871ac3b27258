"""Images: classifiers; lists of images with boxes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.public.cases import MARKS, REPLICAS, WHOLE, ZERO_BUBBLE, Built, Case, check, table

timm = pytest.importorskip("timm")
datasets = pytest.importorskip("sklearn.datasets")
torchvision = pytest.importorskip("torchvision")
detection = pytest.importorskip("torchvision.models.detection")
boxes_module = pytest.importorskip("torchvision.ops.boxes")
roi_align = pytest.importorskip("torchvision.ops.roi_align")

pytestmark = MARKS

if torch.version.cuda is None:
    boxes_module._assert_has_ops = lambda: None  # torchvision_on_cpu has them
    roi_align._roi_align = inspect.unwrap(roi_align._roi_align)  # which is compiled where it lacks them, for a minute

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


def squares(count: int = 16, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Images with a bright square, and its box."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        image = 0.1 * torch.randn(3, size, size, generator=generator)
        low, high = 2 + index % 8, 20 + index % 11
        image[:, low:high, low + 1 : high] += 1
        rows.append((image, torch.tensor([low + 1.0, low, high, high])))
    return rows


def tower() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
    )  # fmt: skip
    model.out_channels = 32
    return model


def lists(batch: Any) -> Any:
    return tuple(zip(*batch, strict=True))


class FasterRcnn(Built):
    """A dict of losses, predictions in evaluation; samples its proposals by torch's random numbers."""

    rows = 4
    rate = 0.002
    collate = staticmethod(lists)

    def build(self) -> Any:
        anchors = detection.anchor_utils.AnchorGenerator(sizes=((8, 16),), aspect_ratios=((1.0,),))
        pooler = torchvision.ops.MultiScaleRoIAlign(["0"], output_size=3, sampling_ratio=1)
        options = {"rpn_anchor_generator": anchors, "box_roi_pool": pooler, "rpn_post_nms_top_n_train": 20}
        return detection.FasterRCNN(tower(), num_classes=2, min_size=32, max_size=32, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, targets = batch
        losses = self.model(list(images), list(targets))
        loss = sum(losses.values())
        self.log_dict(losses)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        found = self.model(list(images))
        self.log("val_count", torch.tensor([float(len(one["boxes"])) for one in found]).mean())

    def data(self) -> Any:
        return [(image, {"boxes": box[None], "labels": torch.tensor([1])}) for image, box in squares()]


@table(
    Case(TimmVit, REPLICAS, ranks=4, variant="replicas"),
    Case(TimmSwin, ZERO_BUBBLE, variant="zero_bubble"),
    Case(FasterRcnn, WHOLE),
)
def test_vision(case: Case) -> None:
    check(case)
