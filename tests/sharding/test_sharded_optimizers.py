"""Sharded optimizers on process groups, without Lightning."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.sharding import flat_parameters
from lightning_smddp.sharding.flat_parameters import lay_out
from lightning_smddp.sharding.optimizer_shards import OptimizerShards
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers
from tests.ranks import run_each, run_ranks

CPU = torch.device("cpu")


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def adafactor(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.01)


def scaled(module: nn.Module) -> torch.optim.Optimizer:
    """Of a class whose step calls that of its base, for which torch calls hooks as well where one was made before."""
    torch.optim.SGD(module.parameters())
    return Scaled(module.parameters(), lr=0.1)


class Scaled(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.9)
        return loss


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.Tanh(), nn.Linear(50, 700), nn.Linear(700, 7))


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int = 4) -> list[Tensor]:
    """Equal gradients on all ranks; hooks write to parameters between steps."""
    for step in range(count):
        inputs = torch.randn(4, 30, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()
        for p in module.parameters():
            p.data.mul_(0.98)
    return [p.detach().clone() for p in module.parameters()]


@contextmanager
def sharing(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[ShardedOptimizers]:
    """Until the end of the block the ranks share the optimizer."""
    assert dist.group.WORLD is not None
    communicator = Communicator(dist.group.WORLD, CPU, timedelta(seconds=20))
    try:
        shards = ShardedOptimizers(module.parameters(), [OptimizerShards(optimizer)], communicator)
        yield shards
        shards.close()
    finally:
        communicator.close()


MAKERS = (adamw, adafactor, scaled)


def sharded(make: Any) -> tuple[list[Tensor], bool, int, bool]:
    module = layers()
    optimizer = make(module)
    with sharing(module, optimizer) as shards:
        weights = steps(module, optimizer)
        elements = sum(v.numel() for state in optimizer.state.values() for v in state.values())
        is_shared = "shared memory" in dict(shards.describe())["optimizer shards"]
    is_kept = all(torch.equal(p, weight) for p, weight in zip(module.parameters(), weights, strict=True))
    return weights, is_shared, elements, is_kept


def pieces_of_a_mebibyte(fused: bool) -> int:
    weight = nn.Parameter(torch.zeros(1024, 256))
    shards = OptimizerShards(torch.optim.AdamW([nn.Parameter(torch.zeros(3)), weight], fused=fused))
    values = weight.detach().flatten()
    layouts = lay_out([weight], 1, True)
    flat = SimpleNamespace(layouts=layouts, share=0, values=lambda layout, slot, low, high: values[low:high])
    shards.cut(flat, True)
    return len(shards.parts_of(weight))


def test_a_fused_kernel_gets_its_share_in_one_piece() -> None:
    """Others pass over memory many times, so on a CPU each of their pieces is as large as a cache."""
    assert [pieces_of_a_mebibyte(fused) for fused in (True, False)] == [1, 4]


def sharded_with_each() -> dict[str, Any]:
    return {make.__name__: sharded(make) for make in MAKERS}


@pytest.mark.parametrize(
    ("node_ids", "shares_memory"),
    [(["a", "a", "a"], True), (["a", "b", "b"], True), (["a", "b"], False)],
)
def test_steps_equal_those_of_one_process(node_ids, shares_memory):
    results = run_ranks(sharded_with_each, len(node_ids), node_ids=node_ids)
    for make in MAKERS:
        module = layers()
        optimizer = make(module)
        expected = steps(module, optimizer)
        for result in results:
            weights, is_shared, _, is_kept = result[make.__name__]
            assert is_shared is shares_memory
            assert is_kept
            torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)
        if make is adamw and node_ids == ["a"] * 3:  # each element has state on one rank
            whole = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.ndim > 0)
            shares = [result[make.__name__][2] for result in results]
            assert whole <= sum(shares) <= whole + 3 * 20  # and a `step` for each piece
            assert max(shares) < 0.36 * whole


def without_memory() -> str:
    def create_file(size: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    flat_parameters.create_file = create_file
    module = layers()
    with pytest.raises(MemoryError) as caught, sharing(module, adamw(module)):
        pass
    return str(caught.value)


def test_where_a_node_has_no_memory_for_its_copy_all_of_its_ranks_say_so():
    for rank, message in enumerate(run_ranks(without_memory, 2)):
        assert "bytes of memory that ranks can share are left on" in message
        assert f"rank {rank} (host" in message
        assert "use strategy='smddp_fsdp'" in message


def clipped(make: Any, norm_type: float, max_norm: float, dtype: torch.dtype) -> tuple[float, list[Tensor], float]:
    """The norm, clipped gradients, and how much of them this rank has read for it."""
    module = layers().to(dtype)
    module[1].bias.requires_grad_(False)
    optimizer = make(module)
    with sharing(module, optimizer) as shards:
        module(torch.ones(4, 30, dtype=dtype)).square().mean().backward()
        total = sum(p.grad.numel() for p in module.parameters() if p.grad is not None)
        read = sum(part.numel() for part in shards.shards[0].gradients(of_all=dist.get_rank() == 0))
        norm = shards.clip_by_norm(optimizer, max_norm, norm_type)
    return float(norm), [p.grad.clone() for p in module.parameters() if p.grad is not None], read / total


NORMS = [
    (2.0, 0.01, torch.float32),
    (1.0, 0.01, torch.float32),
    (float("inf"), 0.001, torch.float32),
    (2.0, 1e6, torch.float32),
    (2.0, 0.01, torch.bfloat16),
]


CLIPPED = [(make, *norm) for make in (adamw, adafactor) for norm in NORMS]


def test_each_rank_reads_its_share_for_the_norm() -> None:
    everyones = run_ranks(run_each, 2, clipped, CLIPPED)
    for (_, norm_type, max_norm, dtype), *results in zip(CLIPPED, *everyones, strict=True):
        module = layers().to(dtype)
        module[1].bias.requires_grad_(False)
        module(torch.ones(4, 30, dtype=dtype)).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        for norm, found, _ in results:
            assert norm == pytest.approx(float(expected), rel=1e-6)
            torch.testing.assert_close(found, gradients, rtol=1e-6, atol=1e-12)
        assert sum(read for *_, read in results) == 1.0
