"""Models that do not fit: found at setup, on every rank, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication.consistency import check_same_lengths, check_same_model, check_same_optimizers
from tests.communication.errors import message_of
from tests.ranks import run_in_threads


def same(rank: int) -> nn.Module:
    torch.manual_seed(rank)  # values may differ: DDP broadcasts them
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def wider(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1 + (rank == 2)))


def frozen(rank: int) -> nn.Module:
    model = same(rank)
    model[1].bias.requires_grad_(rank != 2)
    return model


def longer(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), *([nn.Linear(3, 1)] if rank == 2 else []))


def with_buffer(rank: int) -> nn.Module:
    model = same(rank)
    model.register_buffer("seen", torch.zeros(2 + (rank == 2)))
    return model


def check(group: dist.ProcessGroup, make: Callable[[int], nn.Module]) -> str:
    check_same_model(same(group.rank()), group)
    return message_of(ValueError, lambda: check_same_model(make(group.rank()), group))


@pytest.mark.parametrize(
    ("make", "first", "last"),
    [
        (wider, "parameter 1.weight: shape (1, 3), torch.float32", "parameter 1.weight: shape (2, 3), torch.float32"),
        (frozen, "parameter 1.bias: shape (1,), torch.float32", "parameter 1.bias: shape (1,), torch.float32, frozen"),
        (longer, "nothing more", "parameter 1.weight: shape (1, 3), torch.float32"),
        (with_buffer, "buffer seen: shape (2,), torch.float32", "buffer seen: shape (3,), torch.float32"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(make: Callable[[int], nn.Module], first: str, last: str) -> None:
    messages = run_in_threads(check, 3, make)
    assert len(set(messages)) == 1
    assert f"The first difference: rank 0 has {first}; rank 2 has {last}" in messages[0]


def adam(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1 if rank == 2 else 0.2)


def groups(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    halves = [{"params": list(half.parameters())} for half in model]
    return torch.optim.SGD(halves if rank == 2 else list(model.parameters()), 0.1)


def order(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.SGD([parameters[i] for i in ((0, 2, 1, 3) if rank == 2 else range(4))], 0.1)


def nothing_different(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))


def optimizers(group: dist.ProcessGroup, make: Callable[[nn.Module, int], torch.optim.Optimizer], rank: int) -> str:
    model = same(group.rank())
    made = [make(model, group.rank())]
    schedules = [f"StepLR every {1 + (rank == group.rank())} epoch"]
    return message_of(ValueError, lambda: check_same_optimizers(model, made, schedules, group))


@pytest.mark.parametrize(
    ("make", "scheduled", "first", "other"),
    [
        (adam, -1, "Adam 0, group 0: lr=0.2", "Adam 0, group 0: lr=0.1"),
        (groups, -1, "SGD 0, group 0: 1.weight", "SGD 0, group 0: dampening=0"),
        (order, -1, "SGD 0, group 0: 0.bias", "SGD 0, group 0: 1.weight"),
        (nothing_different, 2, "StepLR every 1 epoch", "StepLR every 2 epoch"),
    ],
)
def test_optimizers_that_differ(make: Callable[..., Any], scheduled: int, first: str, other: str) -> None:
    messages = run_in_threads(optimizers, 3, make, scheduled)
    assert len(set(messages)) == 1
    assert re.search(f"rank 0 has {first}; rank 2 has {other}", messages[0])


def lengths(group: dist.ProcessGroup, numbers: list[float]) -> str:
    if len(set(numbers)) == 1:
        check_same_lengths(numbers[group.rank()], 3, group)
        return ""
    return message_of(ValueError, lambda: check_same_lengths(numbers[group.rank()], 3, group))


@pytest.mark.parametrize(
    ("numbers", "parts"),
    [
        ([5, 5, 5], []),
        ([float("inf")] * 3, []),
        ([5, 7, 5], ["training batches in epoch 3 differ", "rank 0 has 5; rank 1 has 7. ", "limit_train_batches"]),
        ([5, float("inf"), 5], ["rank 0 has 5; rank 1 has an unknown number", "limit_train_batches"]),
    ],
)
def test_numbers_of_batches(numbers: list[float], parts: list[str]) -> None:
    messages = run_in_threads(lengths, 3, numbers)
    assert len(set(messages)) == 1
    assert all(part in messages[0] for part in parts)
