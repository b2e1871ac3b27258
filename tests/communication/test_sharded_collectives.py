"""FSDP2 with our collectives, against FSDP2 with its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.communication.sharded_collectives import ShardedCollectives
from tests.communication.errors import message_of
from tests.ranks import RanksFailedError, run_ranks

PATIENCE = timedelta(seconds=20)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_SUMMED_IN_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16_SUMMED = MixedPrecisionPolicy(reduce_dtype=torch.float16)
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
    "bf16 summed in fp32": {"mp_policy": BF16_SUMMED_IN_FP32, "reshard_after_forward": False},
    "summed in fp16": {"mp_policy": FP16_SUMMED},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
# What depends on how ranks lie: the others differ by what each rank does for itself.
FEW = ["full", "bf16 summed in fp32"]
TOLERANCES = {"bf16": 1e-2, "summed in fp16": 1e-2}  # gloo rounds each partial sum, we round once


class Model(nn.Module):
    """Parameters of odd sizes, with fewer rows than ranks, frozen ones, and some that not each step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 13), nn.GELU(), nn.LayerNorm(13)) for _ in range(3))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.seldom = nn.Linear(13, 13)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(13, 1)

    def forward(self, inputs: Tensor, seldom: bool = False) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = self.frozen(hidden)
        if seldom:
            hidden = hidden + self.seldom(hidden)
        return self.head(hidden) * self.scale


def shard(mesh: DeviceMesh, **options: Any) -> Model:
    model = Model()
    for unit in (model.first, *model.blocks, model.frozen, model.seldom, model.head):
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(model: Model, steps: int = 3) -> list[Tensor]:
    """Whole parameters after some steps, with clipping, accumulation and an evaluation in between."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1 or step % 2 == 0)  # type: ignore[operator]
            inputs = torch.randn(5, 7, generator=generator)
            (model(inputs, seldom=step % 2 == 1).float() - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 7))
    for unit in units_of(model):
        unit.reshard()
    return [whole(parameter) for parameter in model.parameters()]


def units_of(model: nn.Module) -> list[FSDPModule]:
    return [unit for unit in model.modules() if isinstance(unit, FSDPModule)]


def whole(parameter: Any) -> Tensor:
    found: Tensor = parameter.full_tensor().detach()
    return found


def differences(
    mesh: DeviceMesh, prepare: Callable[[nn.Module], None] = lambda module: None, **options: Any
) -> tuple[float, str]:
    """The largest difference to FSDP2's own collectives, and how ours travel."""
    stock = shard(mesh, **options)
    prepare(stock)
    expected = train(stock)
    collectives = ShardedCollectives(mesh, PATIENCE)
    try:
        model = shard(mesh, **options)
        prepare(model)
        collectives.attach(model)
        found = train(model)
        initial = [parameter.detach() for parameter in Model().parameters()]
        assert any(not torch.equal(after, before) for after, before in zip(found, initial, strict=True))
        largest = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        return largest, collectives.describe()
    finally:
        collectives.close()


def train_cases(names: list[str]) -> dict[str, tuple[float, str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: differences(mesh, **CASES[name]) for name in names}


@pytest.mark.parametrize(
    ("size", "names"),
    [
        pytest.param(2, FEW, id="2-few"),
        pytest.param(2, ["bf16", "summed in fp16", "offload"], marks=pytest.mark.slow, id="2-others"),
        pytest.param(3, [*CASES], marks=pytest.mark.exhaustive, id="3-all"),
    ],
)
def test_the_same_as_fsdp2_with_its_own_collectives(size: int, names: list[str]) -> None:
    for results in run_ranks(train_cases, size, names):
        for name, (difference, way) in results.items():
            assert way == "shared memory"
            assert difference <= TOLERANCES.get(name, 1e-6), (name, difference)
        assert [*results] == names
        assert size > 2 or "full" not in names or results["full"][0] == 0.0


def train_replicas(shape: tuple[int, int]) -> tuple[float, str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return differences(mesh)


BETWEEN_NODES = "shared memory in each node, the backend between ranks of equal local rank"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param("aabb", "shared memory", marks=pytest.mark.slow),
        pytest.param("abab", BETWEEN_NODES, marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_of_sharded_parameters(nodes: str, expected: str) -> None:
    """Shares inside a node and replicas between nodes, and the other way round."""
    for difference, way in run_ranks(train_replicas, 4, (2, 2), node_ids=list(nodes)):
        assert difference <= 1e-6
        assert way == expected


NODES = ["aabb", "abba", "abc"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        pytest.param("abba", ["full"], id="abba"),
        pytest.param("abc", ["bf16 summed in fp32"], id="abc"),
        *(pytest.param(nodes, [*CASES], marks=pytest.mark.exhaustive, id=nodes + "-all") for nodes in NODES),
    ],
)
def test_parameters_that_are_sharded_over_nodes(nodes: str, names: list[str]) -> None:
    for results in run_ranks(train_cases, len(nodes), names, node_ids=list(nodes)):
        for name, (difference, way) in results.items():
            assert way == BETWEEN_NODES
            assert difference <= TOLERANCES.get(name, 1e-6), (name, difference)


def die_in_backward() -> None:
    mesh = init_device_mesh("cpu", (2,))
    collectives = ShardedCollectives(mesh, PATIENCE)
    model = shard(mesh)
    collectives.attach(model)
    train(model, steps=1)
    loss = model(torch.ones(2, 7)).sum()
    if dist.get_rank() == 1:
        os._exit(3)
    start = time.monotonic()
    message = message_of(RankFailedError, loss.backward)
    assert message.startswith("rank 1 (host "), message
    assert time.monotonic() - start < 5
    collectives.close()


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(die_in_backward, 2)
    assert list(caught.value.tracebacks) == [1]
    assert not caught.value.hung
