"""A step that cannot be pipelined is refused: why, where, and what would help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.public.cases import MARKS, WHOLE, Case, Learner, check, table
from tests.public.reinforcement import Dqn
from tests.public.test_forecasting import DeepAr
from tests.public.test_generative import DeepKernel
from tests.public.test_graphs import SchNetForces
from tests.public.test_self_supervised import Byol
from tests.public.test_special_layers import Spiking
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
    refused(Byol, r"SplitError: .* parameter 'backbone_momentum\S+' .*on_train_batch_end"),
    refused(Spiking, r"SplitError: The step replaces buffer 'hidden.mem'.* Change it in place"),
    refused(DeepKernel, r"SplitError: The step takes another path each time that it is run on the same batch"),
    refused(DeepAr, r"SplitError: 2 stages were asked for.* 'rnn' is opened, as the size of .* the batch's values"),
    refused(Dqn, r"SplitError: 2 stages were asked for, but the step has only 1 unit \(objective\)"),
    refused(SchNetForces, r"SplitError: The step runs a backward pass of its own at \S*test_graphs.py:\d+"),
    refused(Scripted, r"SplitError: Module 'model' is scripted.* script it afterwards"),
)
def test_refused(case: Case) -> None:
    check(case)
