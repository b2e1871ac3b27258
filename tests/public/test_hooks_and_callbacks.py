"""What people write around the step: averages of weights, clipping, norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn import functional as F

from tests.public.cases import MARKS, Case, Learner, check, table
from tests.public.test_vision import digits

timm = pytest.importorskip("timm")

pytestmark = MARKS

# Cuts at measured times differ from run to run, and some put everything that belongs together on one rank.
CUT = {"split": ["model.blocks.2"]}


class Vit(Learner):
    """A transformer of timm; what differs is around it."""

    rate = 0.02

    def __init__(self) -> None:
        super().__init__()
        sizes = {"img_size": 16, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 4, "num_heads": 2}
        sizes["qkv_bias"] = False  # the bias of keys has no gradient but rounding
        self.model = timm.models.VisionTransformer(**sizes, num_classes=10)
        self.shown: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def data(self) -> Any:
        return digits(size=16, channels=1)


class EmaCallback(Callback):
    """The average as state_dict tensors in a callback, exchanged around validation, in checkpoints."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            for name, value in pl_module.state_dict().items():
                self.average[name].mul_(0.9).add_(value, alpha=0.1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.kept)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.shown = [float(value.sum()) for value in self.average.values()]


class ClippedByHand(Vit):
    """Beside it norms are logged, as Lightning's documentation shows it, and that of all weights."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("total", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))
        self.log_dict(grad_norm(self, norm_type=2))
        self.log("weights", sum(weight.detach().pow(2).sum() for weight in self.parameters()).sqrt())


@table(
    Case(Vit, CUT, trainer={"callbacks": [EmaCallback]}),
    Case(ClippedByHand, CUT),
)
def test_hooks_and_callbacks(case: Case) -> None:
    check(case)
