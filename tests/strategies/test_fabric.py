"""``Fabric(strategy="smddp")``."""

from __future__ import annotations

import contextlib
import importlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_smddp import SMDDPFabricStrategy
from tests.ranks import run_each, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, local_devices, num_nodes, samples


def make_fabric(strategy: Any, package: str = "lightning.fabric") -> Any:
    fabric_class = importlib.import_module(package).Fabric
    return fabric_class(accelerator="cpu", devices=local_devices(), num_nodes=num_nodes(), strategy=strategy)


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def train(fabric: Any, module: nn.Module, epochs: int = 2, accumulate: int = 2) -> Tensor:
    """Returns the weights."""
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(samples(48), batch_size=4))
    for _ in range(epochs):
        for index, (inputs, targets) in enumerate(loader):
            stepping = index % accumulate == accumulate - 1
            with fabric.no_backward_sync(model, enabled=not stepping):
                fabric.backward(F.cross_entropy(model(inputs), targets))
            if stepping:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    return weights(module)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def train_with(strategy: str, package: str) -> tuple[Tensor, float, str]:
    fabric = make_fabric(strategy, package)
    fabric.launch()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        trained = train(fabric, network())
    mean = fabric.all_reduce(torch.tensor(float(fabric.global_rank))).item()
    return trained, mean, text.getvalue()


@pytest.mark.slow
def test_equals_ddp() -> None:
    names = [("ddp", "lightning.fabric"), ("smddp", "lightning.fabric"), ("smddp", "lightning_fabric")]
    for rank, ((expected, *_), *ours) in enumerate(run_trainer_ranks(run_each, 2, train_with, names)):
        for actual, mean, printed in ours:
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
            assert mean == 0.5
            assert ("bucket size" in printed) == (rank == 0)


def new_strategy(compression: Any) -> Any:
    return SMDDPFabricStrategy(**grouped(compression=compression, verbose=False))


def train_compressed() -> tuple[Tensor, int]:
    strategy = new_strategy("int8")
    assert strategy.communication_report is None
    fabric = make_fabric(strategy)
    fabric.launch()
    trained = train(fabric, network(), epochs=1, accumulate=1)
    steps = strategy.communication_report.steps
    strategy.teardown()
    return trained, steps


def test_compressed_gradients_and_their_report() -> None:
    (first, steps), (second, _) = run_trainer_ranks(train_compressed, 2, node_ids=["a", "b"])
    assert torch.equal(first, second)
    assert steps == 6
