"""Ranks whose batches, models or optimizers differ: an error on every rank, or a documented result. Never a hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, Learner, make_trainer, samples, silent


def strategy_of(name: str) -> Any:
    from lightning_smddp import PipelineStrategy

    sizes = {"stages": 2, "replicas": 1}
    common = {"verbose": False, "algorithm": "native"}
    return (
        silent(**common)
        if name == "smddp"
        else PipelineStrategy(**grouped(pipeline_parallel_size=sizes[name], **common))
    )


class Sampled(Learner):
    """With the sampler that the strategy asks for."""

    def train_dataloader(self) -> Any:
        data = samples(self.count)
        sampler: Any = DistributedSampler(data, shuffle=False, **self.trainer.distributed_sampler_kwargs)
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)


class Uneven(Learner):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(16 + 8 * self.global_rank), batch_size=4)


class Growing(Learner):
    """One rank's loader gets longer after the first epoch, and is not reloaded."""

    def train_dataloader(self) -> Any:
        data = [samples(8)[:4]] * (6 if self.global_rank else 4)
        loader = DataLoader(data, batch_size=None)
        loader.__class__ = type("Changing", (DataLoader,), {"__len__": lambda _: self.length()})
        return loader

    def length(self) -> int:
        return 4 - (self.current_epoch * self.global_rank)


class OtherRate(Sampled):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * (1 + self.global_rank))


class Wider(Sampled):
    def configure_model(self) -> None:
        self.net[2] = nn.Linear(16, CLASSES + self.global_rank)


class OtherBuffer(Sampled):
    def configure_model(self) -> None:
        self.register_buffer("seen", torch.zeros(2 + self.global_rank))


def error_of(name: str, model: type[Learner]) -> str:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"\w") as caught:
        make_trainer(strategy_of(name), use_distributed_sampler=False).fit(model())
    assert time.monotonic() - begin < 10
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "model", "parts"),
    [
        ("smddp", Uneven, ["batches in epoch 0 differ", ") has 4; rank 1 (", ") has 6. ", "limit_train_batches"]),
        ("replicas", Uneven, ["batches in epoch 0 differ", ") has 4; rank 1 (", ") has 6. "]),
        ("smddp", Growing, ["batches in epoch 1 differ", ") has 4; rank 1 (", ") has 3. "]),
        ("smddp", OtherRate, ["SGD 0, group 0 of 1: lr=0.1", "SGD 0, group 0 of 1: lr=0.2"]),
        ("stages", OtherRate, ["SGD 0, group 0 of 1: lr=0.1", "SGD 0, group 0 of 1: lr=0.2"]),
        ("stages", Wider, ["parameter net.2.weight", "(3, 16)", "(4, 16)"]),
        ("stages", OtherBuffer, ["buffer seen: ", "(2,)", "(3,)"]),
        ("smddp", OtherBuffer, ["buffer seen: ", "(2,)", "(3,)"]),
    ],
)
def test_named_on_every_rank(name: str, model: type[Learner], parts: list[str]) -> None:
    first, second = run_trainer_ranks(error_of, 2, name, model)
    assert first == second
    for part in parts:
        assert part in first


class UsedOnRankOne(Sampled):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss + self.extra(torch.ones(1, 2)).sum() if self.global_rank == 1 else loss


def train_with_flag() -> list[float]:
    model = UsedOnRankOne()
    before = model.extra.bias.detach().clone()
    strategy = silent(algorithm="native", find_unused_parameters=True)
    make_trainer(strategy, use_distributed_sampler=False, max_steps=1).fit(model)
    change: list[float] = (model.extra.bias.detach() - before).tolist()
    return change


def test_a_parameter_used_on_one_rank_only() -> None:
    """With the flag it gets the mean: half of that rank's gradient (1), times the learning rate (0.1)."""
    for change in run_trainer_ranks(train_with_flag, 2):
        assert change == pytest.approx([-0.05, -0.05])
