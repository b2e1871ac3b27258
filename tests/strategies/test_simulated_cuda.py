"""On simulated CUDA devices: training as on the CPU, and how often a step makes the host wait for the device."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, assert_equal, fit, samples, silent
from tests.strategies.pipeline_learners import Bench, Net, assert_same

pytestmark = pytest.mark.simulated_cuda


def fit_data_parallel(algorithms: list[str]) -> list[Any]:
    strategies = ["ddp", "smddp", *(silent(algorithm=name) for name in algorithms)]
    return [fit(strategy, Learner(), max_epochs=1) for strategy in strategies]


@pytest.mark.parametrize(
    ("ranks", "algorithms"), [(1, []), pytest.param(2, ["native", "hierarchical", "balanced"], marks=pytest.mark.slow)]
)
def test_smddp_equals_one_process(ranks: int, algorithms: list[str]) -> None:
    alone = fit("auto", Learner(batch_size=4 * ranks), accelerator="cpu", max_epochs=1)
    for stock, *outcomes in run_trainer_ranks(fit_data_parallel, ranks, algorithms):
        for ours in outcomes:
            assert_equal(ours, stock)
            assert_same(ours.weights, alone.weights)


class OwnBatches(Net):
    """Ranks have other batches: those of the first count. Some labels do not."""

    first = 0  # of this process's numbers

    def train_dataloader(self) -> Any:
        inputs, labels = samples(self.count).tensors
        labels = torch.where(torch.arange(len(labels)) % 5 == 0, -100, labels)
        return DataLoader(TensorDataset(inputs + self.first, labels.roll(self.first)), batch_size=self.batch_size)


class OwnOnDevice(OwnBatches):
    """They differ only when they are on the device."""

    def train_dataloader(self) -> Any:
        self.first, first = 0, self.first
        loader, self.first = super().train_dataloader(), first
        return loader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + self.first, batch[1].roll(self.first)]


class ChangesInHook(OwnOnDevice):
    """The same, in place."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].add_(self.first)
        batch[1].copy_(batch[1].roll(self.first))


class OwnBackward(Net):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        (3.0 * loss).backward()


class BehindLoss(Callback):
    """Has the loss in its hands before the backward pass."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        loss.register_hook(lambda gradient: 0.5 * gradient)


CASES: dict[str, tuple[type[Net], list[type[Callback]]]] = {
    "plain": (Net, []),
    "batches of their own": (OwnBatches, []),
    "batches of their own on the device": (OwnOnDevice, []),
    "batches changed in a hook": (ChangesInHook, []),
    "own backward": (OwnBackward, []),
    "a hook on the loss": (Net, [BehindLoss]),
}


# What others of `CASES` do not do with more.
SOME = ["batches of their own on the device", "batches changed in a hook", "a hook on the loss"]


def fit_pipelines(names: list[str]) -> dict[str, Any]:
    OwnBatches.first = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return {name: _fit_case(name) for name in names}


def _fit_case(name: str) -> Any:
    module, callbacks = CASES[name]
    return Bench({"schedule": "1f1b"}).fit(module(), max_epochs=1, callbacks=[make() for make in callbacks])["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [SOME, pytest.param([name for name in CASES if name not in SOME], marks=pytest.mark.exhaustive)],
    ids=["some", "rest"],
)
def test_pipelines_equal_one_process(names: list[str]) -> None:
    """Other schedules, and one rank: ``tests/gpu/test_pipelines.py``."""
    outcomes = run_trainer_ranks(fit_pipelines, 2, names)
    for name in names:
        module, callbacks = CASES[name]
        more = {"accelerator": "cpu", "max_epochs": 1, "callbacks": [make() for make in callbacks]}
        alone = fit("auto", module(), **more)
        for outcome in outcomes:
            assert_same(outcome[name], alone.weights)
