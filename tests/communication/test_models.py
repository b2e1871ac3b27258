"""Models that do not fit: found at setup, on every rank, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.consistency import (
    check_compression,
    check_same_lengths,
    check_same_model,
    check_same_optimizers,
    check_trainable,
)
from lightning_smddp.communication.topology import Topology
from tests.communication.errors import message_of
from tests.ranks import run_in_threads

CPU = torch.device("cpu")


def same(rank: int) -> nn.Module:
    torch.manual_seed(rank)  # values may differ: DDP broadcasts them
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def wider(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1 + (rank == 2)))


def of_other_dtype(rank: int) -> nn.Module:
    model = same(rank)
    return model.double() if rank == 2 else model


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
    topology = Topology.from_identities(["x", "x", "y"], group.rank())
    return message_of(ValueError, lambda: check_same_model(make(group.rank()), group, CPU, topology))


def accept(group: dist.ProcessGroup) -> None:
    check_same_model(same(group.rank()), group, CPU, Topology.from_identities(["x"] * 3, group.rank()))


def test_models_that_differ_in_values_only_pass() -> None:
    run_in_threads(accept, 3)


@pytest.mark.parametrize(
    ("make", "position", "first", "last"),
    [
        (wider, 2, "1.weight: shape (1, 3), torch.float32", "1.weight: shape (2, 3), torch.float32"),
        (of_other_dtype, 0, "0.weight: shape (3, 2), torch.float32", "0.weight: shape (3, 2), torch.float64"),
        (frozen, 3, "1.bias: shape (1,), torch.float32", "1.bias: shape (1,), torch.float32, frozen"),
        (longer, 2, "nothing", "1.weight: shape (1, 3), torch.float32"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(
    make: Callable[[int], nn.Module], position: int, first: str, last: str
) -> None:
    messages = run_in_threads(check, 3, make)
    assert len(set(messages)) == 1
    assert (
        f"The first difference is parameter {position}: rank 0 (host x, local rank 0) has {first}; "
        f"rank 2 (host y, local rank 0) has {last}."
    ) in messages[0]


def test_buffers_are_compared() -> None:
    messages = run_in_threads(check, 3, with_buffer)
    assert len(set(messages)) == 1
    assert "The first difference is buffer 0: rank 0 (host x, local rank 0) has seen: shape (2,)" in messages[0]
    assert "seen: shape (3,), torch.float32" in messages[0]


def adam(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1 if rank == 2 else 0.2)


def groups(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    halves = [{"params": list(half.parameters())} for half in model]
    return torch.optim.SGD(halves if rank == 2 else list(model.parameters()), 0.1)


def order(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.SGD([parameters[i] for i in ((0, 2, 1, 3) if rank == 2 else range(4))], 0.1)


def kind(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return (torch.optim.AdamW if rank == 2 else torch.optim.Adam)(model.parameters())


def nothing_different(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))


def optimizers(group: dist.ProcessGroup, make: Callable[[nn.Module, int], torch.optim.Optimizer], rank: int) -> str:
    model = same(group.rank())
    made = [make(model, group.rank())]
    schedules = [f"StepLR every {1 + (rank == group.rank())} epoch"]
    return message_of(ValueError, lambda: check_same_optimizers(model, made, schedules, group, CPU))


@pytest.mark.parametrize(
    ("make", "scheduled", "first", "other"),
    [
        (adam, -1, "lr=0.2 in group 0 of optimizer 0", "lr=0.1 in group 0 of optimizer 0"),
        (groups, -1, "optimizer 0 is SGD with 1 group", "optimizer 0 is SGD with 2 groups"),
        (order, -1, "4 parameters, 0.weight to 1.bias (digest", "4 parameters, 0.weight to 1.bias (digest"),
        (kind, -1, "optimizer 0 is Adam with", "optimizer 0 is AdamW with"),
        (nothing_different, 2, "scheduler 0: StepLR every 1 epoch", "scheduler 0: StepLR every 2 epoch"),
    ],
)
def test_optimizers_that_differ(make: Callable[..., Any], scheduled: int, first: str, other: str) -> None:
    messages = run_in_threads(optimizers, 3, make, scheduled)
    assert len(set(messages)) == 1
    assert f"Rank 0 has: {first}" in messages[0]
    assert f"Rank 2 has: {other}" in messages[0]


def lengths(group: dist.ProcessGroup, numbers: list[float]) -> str:
    if len(set(numbers)) == 1:
        check_same_lengths(numbers[group.rank()], 3, group, CPU)
        return ""
    return message_of(ValueError, lambda: check_same_lengths(numbers[group.rank()], 3, group, CPU))


@pytest.mark.parametrize(
    ("numbers", "parts"),
    [
        ([5, 5, 5], []),
        ([float("inf")] * 3, []),
        ([5, 7, 5], ["epoch 3: 5 on ranks 0, 2, 7 on rank 1.", "limit_train_batches=5"]),
        ([5, float("inf"), 5], ["5 on ranks 0, 2, an unknown number on rank 1", "limit_train_batches=5"]),
    ],
)
def test_numbers_of_batches(numbers: list[float], parts: list[str]) -> None:
    messages = run_in_threads(lengths, 3, numbers)
    assert len(set(messages)) == 1
    assert all(part in messages[0] for part in parts)


def test_a_model_without_anything_to_train_is_refused() -> None:
    check_trainable(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"Linear has no parameter that requires a gradient \(2 parameters in all\)"):
        check_trainable(nn.Linear(1, 1).requires_grad_(False))
    with pytest.raises(ValueError, match=r"Identity has no parameter .*\(0 parameters in all\).*configure_model"):
        check_trainable(nn.Identity())


def test_a_gradient_that_cannot_be_compressed_is_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, dtype=torch.complex64))
    check_compression(model, None)
    check_compression(model[0], Compression("int8"))
    with pytest.raises(ValueError, match=r"The gradient of '1.weight' is of torch.complex64 and cannot be compressed"):
        check_compression(model, Compression("int8"))
    model[1].requires_grad_(False)
    check_compression(model, Compression("int8"))
