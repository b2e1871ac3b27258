"""Small models, and one way to train them under any strategy, for the tests of this directory."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities import registry
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests import devices
from tests.strategies.grouped import grouped

# Each Trainer reads the files of all packages that are installed here for callbacks in them: 7 ms.
registry.entry_points = functools.cache(registry.entry_points)

INPUTS, CLASSES = 8, 3
# Lightning's advice where a run goes on from checkpoints; and ours where it does so with another number of ranks.
RESUMING = [
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")
    for text in (
        "Checkpoint directory .* is not empty",
        "The dirpath has changed",
        "Be aware that when using `ckpt_path`",
        "It is recommended to use `self.log",
        "Found [0-9]+ module.*in eval mode",
        "The checkpoint was saved in the middle of an epoch without",
    )
]
IN_ANOTHER_LAYOUT = pytest.mark.filterwarnings("ignore:The run is not continued exactly:UserWarning")
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, INPUTS, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


class Learning:
    """What a model does, for the ``LightningModule`` of either package."""

    def build(self, batch_size: int = 4, count: int = 24) -> None:
        self.batch_size, self.count = batch_size, count
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.losses: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        # Lightning's own sampler shuffles: this one cuts batches of one process into batches of ranks.
        data = samples(self.count)
        sampler: Any = DistributedSampler(data, shuffle=False) if dist.is_initialized() else None
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)


class Learner(Learning, LightningModule):
    def __init__(self, batch_size: int = 4, count: int = 24) -> None:
        super().__init__()
        self.build(batch_size, count)


class AllSteps:
    """Beside a ``Learner``'s training: validation, test and prediction, on the same data."""

    def validation_step(self: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self: Any, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def val_dataloader(self: Any) -> Any:
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


def overflow_in_third_batch(module: Any) -> None:
    """From now on the gradient of its first layer does, so that a scaler leaves that step out."""

    def overflow(gradient: Tensor) -> Tensor:
        return gradient * float("inf") if module.trainer.fit_loop.batch_idx == 2 else gradient

    module.net[0].weight.register_hook(overflow)


@dataclass
class Outcome:
    """What training left on one rank."""

    losses: list[float]
    weights: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


def local_devices() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def num_nodes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) // local_devices()


def make_trainer(strategy: Any, trainer_class: type = Trainer, **options: Any) -> Any:
    """A quiet ``Trainer`` for the ranks that there are; one process without any."""
    ranks: dict[str, Any] = {"devices": local_devices(), "num_nodes": num_nodes()}
    if devices.is_cuda():
        ranks["accelerator"] = "gpu"
    return trainer_class(strategy=strategy, **{**QUIET, "max_epochs": 2, **ranks, **options})


def outcome(model: Any, trainer: Any) -> Outcome:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(model.losses, {name: p.detach().clone() for name, p in model.named_parameters()}, metrics)


def fit(strategy: Any, model: Any, **options: Any) -> Outcome:
    trainer = make_trainer(strategy, **options)
    trainer.fit(model)
    return outcome(model, trainer)


def silent(**options: Any) -> Any:
    """An ``SMDDPStrategy`` that prints nothing."""
    from lightning_smddp import SMDDPStrategy

    return SMDDPStrategy(**grouped(**{"verbose": False, **options}))


def assert_equal(actual: Outcome, expected: Outcome, tolerance: float = 1e-6) -> None:
    """Same loss curve, weights and logged values."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.metrics, expected.metrics, rtol=tolerance, atol=tolerance)
