"""Masks and boxes: lists of images with targets, dice losses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Built, Case, check, table

torchvision = pytest.importorskip("torchvision")
detection = pytest.importorskip("torchvision.models.detection")
smp = pytest.importorskip("segmentation_models_pytorch")
boxes_module = pytest.importorskip("torchvision.ops.boxes")
roi_align = pytest.importorskip("torchvision.ops.roi_align")

pytestmark = MARKS

if torch.version.cuda is None:
    boxes_module._assert_has_ops = lambda: None  # torchvision_on_cpu has them
    roi_align._roi_align = inspect.unwrap(roi_align._roi_align)  # which is compiled where it lacks them, for a minute


def squares(count: int = 16, size: int = 32) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Images with a bright square: image, mask, box."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        image = 0.1 * torch.randn(3, size, size, generator=generator)
        low, high = 2 + index % 8, 20 + index % 11
        image[:, low:high, low + 1 : high] += 1
        mask = torch.zeros(1, size, size)
        mask[:, low:high, low + 1 : high] = 1
        rows.append((image, mask, torch.tensor([low + 1.0, low, high, high])))
    return rows


class Segmenter(Built):
    rate = 0.01

    def loss(self, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.model(batch[0]), batch[1])

    def data(self) -> Any:
        return [(image, mask) for image, mask, _ in squares()]


class SmpUnet(Segmenter):
    """As segmentation-models-pytorch's example with Lightning: statistics of an epoch from lists."""

    def build(self) -> Any:
        self.dice = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.outputs: dict[str, list[Any]] = {"train": [], "val": []}
        return smp.Unet("resnet18", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8), classes=1)

    def shared_step(self, batch: Any) -> dict[str, Tensor]:
        image, mask = batch
        logits = self.model(image)
        predicted = (logits.sigmoid() > 0.5).float()
        tp, fp, fn, tn = smp.metrics.get_stats(predicted.long(), mask.long(), mode="binary")
        return {"loss": self.dice(logits, mask), "tp": tp, "fp": fp, "fn": fn, "tn": tn}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.shared_step(batch)
        self.outputs["train"].append(out)
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs["val"].append(self.shared_step(batch))

    def on_train_epoch_end(self) -> None:
        self.finish("train")

    def on_validation_epoch_end(self) -> None:
        self.finish("val")

    def finish(self, stage: str) -> None:
        counts = [torch.cat([out[name] for out in self.outputs[stage]]) for name in ("tp", "fp", "fn", "tn")]
        self.log(f"{stage}_iou", smp.metrics.iou_score(*counts, reduction="micro"))
        self.outputs[stage].clear()


def tower() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
    )  # fmt: skip
    model.out_channels = 32
    return model


def lists(batch: Any) -> Any:
    return tuple(zip(*batch, strict=True))


class Detector(Built):
    """Lists of images and of targets, a dict of losses, predictions in evaluation."""

    rows = 4
    rate = 0.002
    collate = staticmethod(lists)

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
        return [(image, {"boxes": box[None], "labels": torch.tensor([1])}) for image, _, box in squares()]


SIZES = {"min_size": 32, "max_size": 32}


def anchors() -> Any:
    return detection.anchor_utils.AnchorGenerator(sizes=((8, 16),), aspect_ratios=((1.0,),))


class FasterRcnn(Detector):
    """Samples its proposals by torch's random numbers."""

    def build(self) -> Any:
        pooler = torchvision.ops.MultiScaleRoIAlign(["0"], output_size=3, sampling_ratio=1)
        return detection.FasterRCNN(
            tower(),
            num_classes=2,
            rpn_anchor_generator=anchors(),
            box_roi_pool=pooler,
            rpn_post_nms_top_n_train=20,
            **SIZES,
        )


@table(Case(SmpUnet, WHOLE), Case(FasterRcnn, WHOLE))
def test_detection_segmentation(case: Case) -> None:
    check(case)
