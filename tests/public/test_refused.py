"""A step that cannot be pipelined is refused: why, where, and what would help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, table
from tests.public.test_generative import PythaeVaeGan, VectorQuantised
from tests.public.test_graphs import SchNetForces
from tests.public.test_metric_learning import CrossBatch, TripletMined
from tests.public.test_self_supervised import Byol
from tests.public.test_vision import digits

torchvision = pytest.importorskip("torchvision")

pytestmark = MARKS


class Scripted(Learner):
    """Parameters of a scripted module cannot be taken out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.jit.script(torchvision.models.resnet18(num_classes=10))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def data(self) -> Any:
        return digits()


def refused(make: Any, message: str, **pipeline: Any) -> Case:
    """``message`` is a pattern of one line."""
    return Case(make, {**WHOLE, **pipeline}, refused=message)


@table(
    refused(PythaeVaeGan, r"ValueError: PythaeVaeGan uses manual optimization.* Use strategy='smddp'"),
    refused(Byol, r"SplitError: .* parameter 'backbone_momentum\S+' .*on_train_batch_end"),
    refused(VectorQuantised, r"The step changes buffer 'codes\S+ at .*use num_microbatches=1", num_microbatches=2),
    refused(CrossBatch, r"SplitError: The step (keeps tensors in self.criterion|changes buffer 'criterion)"),
    refused(TripletMined, r"SplitError: .* makes a tensor whose size depends on values.* Pad it"),
    refused(SchNetForces, r"SplitError: The step runs a backward pass of its own at \S*test_graphs.py:\d+"),
    refused(Scripted, r"SplitError: Module 'model' is scripted.* script it afterwards"),
)
def test_refused(case: Case) -> None:
    check(case)
