"""Compressed gradients between two (simulated) nodes: real data are learned, and go on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.ranks import run_trainer_ranks
from tests.strategies.learners import make_trainer, silent

NODES = ["a", "b"]
METHODS = ["bf16", "fp16", "int8", "powersgd"]


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """For training, and for the test: every fifth image."""
    data, target = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(target)
    test = torch.arange(len(inputs)) % 5 == 0
    return TensorDataset(inputs[~test], targets[~test]), (inputs[test], targets[test])


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        data, _ = digits()
        return DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))

    def accuracy(self) -> float:
        _, (inputs, targets) = digits()
        return float((self.net(inputs).argmax(1) == targets).float().mean())


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def learn_digits(compressions: list[Any]) -> list[tuple[float, Tensor]]:
    results = []
    for compression in compressions:
        model = Digits()
        trainer = make_trainer(silent(compression=compression), max_epochs=3)
        trainer.fit(model)
        results.append((model.accuracy(), weights(model)))
    return results


@pytest.mark.slow
def test_digits_are_learned_as_well_as_without_compression() -> None:
    first, second = run_trainer_ranks(learn_digits, 2, [None, *METHODS], node_ids=NODES)
    exact, exact_weights = first[0]
    assert exact > 0.9
    for method, ours, theirs in zip(METHODS, first[1:], second[1:], strict=True):
        assert ours[0] > exact - 0.02, method
        assert torch.equal(ours[1], theirs[1]), method  # the ranks stay together
        assert not torch.equal(ours[1], exact_weights), method  # it did compress


def fit_save_and_resume(path: str) -> tuple[Tensor, Tensor, Tensor]:
    unbroken, first, resumed = Digits(), Digits(), Digits()
    make_trainer(silent(compression="int8"), max_epochs=2).fit(unbroken)
    trainer = make_trainer(silent(compression="int8"), max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(path)
    make_trainer(silent(compression="int8"), max_epochs=2).fit(resumed, ckpt_path=path)
    return weights(first), weights(unbroken), weights(resumed)


@pytest.mark.slow
def test_a_resumed_run_lacks_one_steps_rounding_at_most(tmp_path: Path) -> None:
    for half, unbroken, resumed in run_trainer_ranks(fit_save_and_resume, 2, f"{tmp_path}/int8.ckpt", node_ids=NODES):
        assert (resumed - unbroken).norm() < 0.05 * (unbroken - half).norm()
