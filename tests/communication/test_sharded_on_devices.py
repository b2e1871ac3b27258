"""Sharded parameters on GPUs: FSDP2's own collectives, and gradients that are compressed between nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_smddp.communication.compression import Compression
from lightning_smddp.communication.sharded_collectives import ShardedCollectives
from tests.communication.test_sharded_collectives import PATIENCE, distance
from tests.ranks import run_ranks

pytestmark = pytest.mark.simulated_cuda


def shard_on_device(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5)).to("cuda")
    for unit in (model[0], model[2], model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def train(model: nn.Sequential) -> list[Tensor]:
    """This rank's shares after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(5, 7, generator=generator).to("cuda")
        (model(inputs).float() - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().detach().cpu() for parameter in model.parameters()]  # type: ignore[attr-defined]


def train_on_devices(shape: tuple[int, ...], method: Any) -> list[tuple[float, str]]:
    """How far from FSDP2 alone; compressed, where FSDP2 sums in 16 bits, too."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = [train_with(shape, method, {})]
    if method is not None:
        found.append(train_with(shape, method, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}))
    return found


def train_with(shape: tuple[int, ...], method: Any, options: dict[str, Any]) -> tuple[float, str]:
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    expected = train(shard_on_device(mesh, **options))
    compression = None
    if method is not None:
        compression = Compression(method, block_size=16)
    collectives = ShardedCollectives(mesh, PATIENCE, compression)
    model = shard_on_device(collectives.fsdp_mesh, **options)
    collectives.attach(model)
    found = train(model)
    way = collectives.describe()
    collectives.close()
    return distance(found, expected), way


OWN = "FSDP2's own collectives"
COMPRESSED = "FSDP2's own all-gather, gradients compressed between nodes"


@pytest.mark.parametrize(
    ("shape", "nodes", "method", "expected"),
    [
        ((2,), "aa", None, OWN),
        pytest.param((2, 2), "aabb", None, OWN, marks=pytest.mark.exhaustive),
        pytest.param((2, 2), "aabb", "bf16", f"{OWN}; replicas by hierarchical", marks=pytest.mark.slow),
        pytest.param((4,), "aabb", "int8", COMPRESSED, marks=pytest.mark.slow),
        pytest.param((4,), "abab", "bf16", COMPRESSED, marks=pytest.mark.exhaustive),
        pytest.param((2,), "ab", "int8", COMPRESSED, marks=pytest.mark.exhaustive),
    ],
)
def test_training_on_devices(shape: tuple[int, ...], nodes: str, method: str | None, expected: str) -> None:
    for found in run_ranks(train_on_devices, len(nodes), shape, method, node_ids=list(nodes), backend="nccl"):
        assert len(found) == 1 + (method is not None)
        for error, way in found:
            assert way == expected
            if method is None:
                assert error == 0.0
            else:
                assert error < 0.02
