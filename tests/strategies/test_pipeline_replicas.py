"""Several pipelines side by side, and data that differs between ranks: the same as one process with all the data."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_smddp import Compression
from tests.strategies.learners import CLASSES, samples
from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, assert_same, name_of

# ---- replicas: each has half of every batch ----


class Half(Net):
    """One process takes batches of 8, each of two replicas 4 of these."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(batch_size=8, count=count)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.auroc = MulticlassAUROC(CLASSES)

    def setup(self, stage: str) -> None:
        if self.trainer.world_size > 1:
            self.batch_size = 4

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = torch.nn.functional.cross_entropy(out, batch[1])
        self.accuracy(out, batch[1])
        self.auroc.update(out.softmax(1), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", out.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("correct", (out.argmax(1) == batch[1]).float().sum(), reduce_fx="sum", on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The loss of a replica is that of its half."""
        loss = self.trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean")
        super().on_train_batch_end({"loss": loss}, batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("auroc", self.auroc.compute(), sync_dist=True)
        self.auroc.reset()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def train_dataloader(self) -> Any:
        data, kwargs = samples(self.count), self.trainer.distributed_sampler_kwargs
        sampler: Any = DistributedSampler(data, shuffle=False, **kwargs) if kwargs else None  # Lightning's shuffles
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    val_dataloader = train_dataloader


SHORT = {"limit_val_batches": 1, "num_sanity_val_steps": 0}


def halves(bench: Bench, options: Any = None, **trainer_options: Any) -> Any:
    trainer_options = {"max_epochs": 1, **SHORT, **trainer_options}
    return bench.fit(Half(), {"pipeline_parallel_size": 2, **(options or {})}, **trainer_options)


def replicas(options: Any = None, **trainer_options: Any) -> Case:
    return functools.partial(halves, options=options or {}, **trainer_options)


CASES = [
    replicas(
        {"algorithm": "native", "schedule": "interleaved_zero_bubble"}, accumulate_grad_batches=2, gradient_clip_val=0.1
    )
]
COMPRESSED = replicas({"compression": Compression("bf16", scope="all")})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_two_pipelines(case: Case) -> None:
    FOUR.compare(case)


@pytest.mark.slow
def test_compression() -> None:
    """All ranks have the same weights, near those of one process."""
    results = FOUR.compare(COMPRESSED, tolerance=0.05)
    for result in results[1:]:
        assert_same(result["weights"], results[0]["weights"], 0.0)


# ---- who gets which sample ----


class Watching(Net):
    def __init__(self) -> None:
        super().__init__(batch_size=3)
        self.ids: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.ids.append(batch[0][:, -1])
        return self.loss([batch[0] / 10, batch[1]])

    def train_dataloader(self) -> Any:
        """The last feature of a sample is its number."""
        x, y = samples(24).tensors
        return DataLoader(TensorDataset(torch.cat([x[:, :-1], torch.arange(24.0)[:, None]], 1), y), 3, shuffle=True)


def sample_numbers(bench: Bench) -> Any:
    model = Watching()
    bench.trainer({"pipeline_parallel_size": 2}).fit(model)
    return torch.stack(model.ids).view(2, -1)


@pytest.mark.slow
def test_every_sample_is_seen_once_an_epoch() -> None:
    """With the sampler that Lightning puts in."""
    seen = FOUR.results(sample_numbers)
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(seen[2], seen[3])
    for epoch in range(2):
        assert sorted([*seen[0][epoch].tolist(), *seen[2][epoch].tolist()]) == list(range(24))
    assert not torch.equal(seen[0][0], seen[0][1])


FOUR = Matrix([*CASES, COMPRESSED, sample_numbers], 4)
