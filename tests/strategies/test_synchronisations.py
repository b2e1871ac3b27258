"""How often a training step makes the host wait for its (simulated) device, by line."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import PipelineStrategy
from tests.ranks import run_trainer_ranks
from tests.simulated_cuda.synchronisations import counted, table
from tests.strategies.grouped import grouped
from tests.strategies.learners import fit, samples, silent
from tests.strategies.pipeline_learners import Net

pytestmark = pytest.mark.simulated_cuda

PER_STEP = 1  # of a pipeline's step without user code that asks for values, whatever the number of micro-batches;
ON_DEVICE = {"augmented"}  # one more where labels have to be counted there
MICROBATCHES = 4  # so that a wait for each would be too many


class CountOneStep(Callback):
    """Those of the fourth step; the first ones prepare things."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] | None = None
        self._stack = ExitStack()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.counts = self._stack.enter_context(counted())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stack.close()


class Silent(Net):
    """Asks for no value on the host."""

    def __init__(self) -> None:
        super().__init__(count=64)  # four batches for each of two replicas

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class Labels(Silent):
    """Some labels do not count, so micro-batches are weighted by those that do."""

    def train_dataloader(self) -> Any:
        inputs, labels = samples(self.count).tensors
        labels = torch.where(torch.arange(len(labels)) % 5 == 0, -100, labels)
        return DataLoader(TensorDataset(inputs, labels), batch_size=self.batch_size)


class Augmented(Labels):
    """Makes another batch of it on the device, so that only the device knows what is in it."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.5, batch[1].clone()]


Case = tuple[type[Net], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "16-mixed and clipped": (Silent, {}, {"precision": "16-mixed", "gradient_clip_val": 0.5}),
    "replicas": (Silent, {"pipeline_parallel_size": 1}, {}),
    "augmented": (Augmented, {}, {}),
}


def count_steps(strategy: Any, module: Net, **options: Any) -> Counter[tuple[str, str]]:
    counts = CountOneStep()
    fit(strategy, module, max_epochs=1, limit_train_batches=4, callbacks=[counts], **options)
    assert counts.counts is not None
    return counts.counts


def count_pipeline(module: type[Net], layout: dict[str, Any], options: dict[str, Any], microbatches: int) -> Any:
    quiet = {"verbose": False, "num_microbatches": microbatches}
    return count_steps(PipelineStrategy(**grouped(**quiet, **layout)), module(), **options)


def count_all() -> tuple[Any, Any, dict[str, Any]]:
    stock, ours = (count_steps(strategy, Silent()) for strategy in ("ddp", silent()))
    return stock, ours, {name: count_pipeline(*case, MICROBATCHES) for name, case in CASES.items()}


@pytest.mark.slow
def test_of_a_step() -> None:
    """The limit of a pipeline's is one for any number of micro-batches."""
    for stock, ours, pipelines in run_trainer_ranks(count_all, 2):
        assert ours.total() <= stock.total() + 1, f"ddp:\n{table(stock)}\nsmddp:\n{table(ours)}"
        for name, counts in pipelines.items():
            assert counts.total() <= PER_STEP + (name in ON_DEVICE), f"{name}\n{table(counts)}"
