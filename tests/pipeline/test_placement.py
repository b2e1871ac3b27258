"""Which ranks are a pipeline, which hold which parameters, what messages between them cost, and what has room."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.pipeline.mesh import Channel, Ownership, PipelineMesh
from lightning_smddp.pipeline.partition import costs
from lightning_smddp.pipeline.partition.assignment import follow, parameter_stages_of
from lightning_smddp.pipeline.partition.costs import (
    LOOPBACK,
    NETWORK,
    NVLINK,
    available_host_bytes,
    fits_on_devices,
    fits_on_hosts,
    links_between,
)
from lightning_smddp.pipeline.state.meta_parameters import AbsentParameterError, release
from lightning_smddp.pipeline.state.state_dict import unshard
from lightning_smddp.pipeline.view.view import GlobalView
from lightning_smddp.planner.problem import Link
from tests.pipeline.models import OWNERSHIP, tied
from tests.pipeline.stage_emulation import program_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("placement", "pipelines"),
    [("cluster", ((0, 1, 2, 3), (4, 5, 6, 7))), ("spread", ((0, 2, 4, 6), (1, 3, 5, 7)))],
)
def test_neighbouring_ranks_are_a_pipeline_or_replicas(placement: str, pipelines: Any) -> None:
    assert PipelineMesh.of(8, 4, placement).pipelines == pipelines


def test_sizes_have_to_fit() -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=3 does not divide the world size 8.*1, 2, 4, 8"):
        PipelineMesh.of(8, 3)
    with pytest.raises(ValueError, match=r"placement='near' is unknown.*'cluster'.*'spread'"):
        PipelineMesh.of(8, 2, "near")


@pytest.mark.parametrize(
    ("hosts", "device_type", "expected"),
    [
        ("aaaa", "cuda", (NVLINK, NVLINK, NVLINK)),
        ("aaab", "cuda", (NETWORK, NVLINK, NETWORK)),  # of the second pipeline, which spans hosts
        ("aabb", "cuda", (NVLINK, NVLINK, NVLINK)),
        ("aaab", "cpu", (LOOPBACK, LOOPBACK, LOOPBACK)),  # cores copy, wherever to
    ],
)
def test_links_are_those_of_the_slowest_pipeline(hosts: str, device_type: str, expected: tuple[Link, ...]) -> None:
    pipelines = PipelineMesh.of(4, 2).pipelines
    assert links_between([0, 1, 1, 0], pipelines, hosts, device_type) == expected


# ---- who holds what: those of other ranks have no memory, and cannot be used by mistake ----


def placed(used: list[str], names: list[str], begin: int) -> dict[str, tuple[int, ...]]:
    """Stages of parameters: those in ``used`` are used in this order, and the second stage begins at ``begin``."""
    graph: Any = SimpleNamespace(nodes=[SimpleNamespace(parameters=(name,)) for name in used])
    first = SimpleNamespace(stage=0, begin=0, end=begin)
    stages: Any = [first, SimpleNamespace(stage=1, begin=begin, end=len(used))]
    return parameter_stages_of(graph, stages, names)


@pytest.mark.parametrize(
    ("unused", "stage"),
    [
        ("copy.0.weight copy.1.weight", (0, 1)),  # beside its twin
        ("other.1.weight other.2.weight", (1, 1)),  # of `net` only one has such a name
        ("net.2.weight", (1,)),  # a layer that was left out: behind `net.1`
        ("net.1.own.0.weight net.1.own.1.weight", (1, 1)),  # of a layer: not beside a part of `net` with such names
        ("extra", (1,)),
        ("net.0.extra", (0,)),
    ],
)
def test_what_the_step_does_not_use_is_beside_its_twin_or_its_neighbours(unused: str, stage: tuple[int, ...]) -> None:
    names = ["net.0.weight", "net.1.weight", *unused.split(), "head.weight"]
    found = placed(["net.0.weight", "net.1.weight", "head.weight"], names, begin=1)
    assert list(found) == names
    assert tuple(place for name in unused.split() for place in found[name]) == stage


@pytest.mark.parametrize("left_out", ["encoder.1", "encoder.layers.1 encoder.layers.2"])
def test_a_layer_that_was_left_out_is_no_twin_of_one_in_another_stack(left_out: str) -> None:
    """As layer drop leaves out layers of an encoder, and other layers have the same names, or some of them."""
    used = ["features.1.norm.weight", "encoder.norm.weight", "decoder.1.norm.weight", "decoder.2.norm.weight"]
    names = [f"{layer}.{name}.weight" for layer in left_out.split() for name in ("attention", "norm")]
    found = placed(used, [*used[:2], *names, *used[2:]], begin=1)
    assert {found[name] for name in names} == {(1,)}


@pytest.mark.parametrize(("owner", "begin"), [(0, "2"), (1, "1")])
def test_another_step_changes_buffers_where_they_are_owned(owner: int, begin: str) -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    graph = program_of(root, lambda: root(torch.ones(4, 2)).sum(), bool)
    parameters = {"0.weight": (0,), "0.bias": (0,), "2.weight": (1,), "2.bias": (1,)}
    ownership = Ownership(parameters, {name: owner for name, _ in root.named_buffers()})
    _, second = follow(graph, parameters, ownership, [0, 1])
    assert graph.nodes[second.begin].module == begin


def test_units_keep_less_with_checkpointing_and_run_again_unless_offloaded() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    graph = program_of(root, lambda: root(torch.ones(4, 2)).sum(), bool)
    cluster, times = costs.cluster_of(root, None, [0], [1], ()), costs.NodeTimes([2.0] * 3, [3.0] * 3)
    for how, kept, backward in ((False, 32, 3.0), (True, 0, 5.0), ("offload", 0, 3.0)):
        node = costs.problem_of(graph, cluster, times, how).nodes[0]
        assert (node.activation_bytes, node.backward_s) == (kept, backward)


def test_release_keeps_objects_and_drops_values() -> None:
    model = tied()
    model.head.bias.requires_grad_(False)
    model.body.weight.note = "kept"
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    buffer = model.norm.running_mean
    release(model, OWNERSHIP, 1)
    release(model, OWNERSHIP, 1)  # again: nothing changes
    assert dict(model.named_parameters()) == parameters
    assert all(a is b for a, b in zip(model.parameters(), parameters.values(), strict=True))
    assert model.head.weight is model.embedding.weight
    assert model.favourites[1] is model.body.weight
    assert optimizer.param_groups[0]["params"][1] is model.body.weight
    for name, parameter in parameters.items():
        mine = OWNERSHIP.is_mine(name, 1)
        assert parameter.is_meta is not mine
        assert (parameter.grad is None) is not mine
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad is (name != "head.bias")
    assert model.body.weight.shape == (6, 6)
    assert model.body.weight.note == "kept"
    assert model.norm.running_mean is buffer
    assert not buffer.is_meta


def divided() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parameters = {name: (0,) if name.startswith("0") else (1,) for name, _ in net.named_parameters()}
    release(net, Ownership(parameters, {}), 0)
    return net


def test_what_would_do_nothing_is_an_error_with_its_place() -> None:
    net = divided()
    average = torch.zeros(2, 4)
    for use in (
        lambda: average.add_(net[1].weight.data),
        lambda: average.lerp_(net[1].weight, 0.5),
        lambda: torch._foreach_add_([average], [net[1].weight]),
        lambda: net[1].weight.norm(),
        lambda: net(torch.ones(1, 3)),
        lambda: copy.deepcopy(net),
        lambda: net.state_dict(),
    ):
        with pytest.raises(AbsentParameterError, match=r":\d+ uses parameter '1\.") as error:
            use()
        assert "on rank 1 of the pipeline" in str(error.value)
    assert not average.any()


# ---- whether a module has room: all ranks answer alike ----


ROOM: list[tuple[list[float], str, str, tuple[bool, bool]]] = [  # bytes free and host of each rank, device, answers
    ([9e6, 9e6], "aa", "meta", (True, True)),
    ([9e6, 1.5e6], "aa", "meta", (False, False)),  # two of 1 MB on one host
    ([9e6, 1.5e6], "ab", "meta", (False, True)),
    ([9e6, 0.0], "ab", "cpu", (False, True)),  # it is there already
]


def answers() -> list[tuple[bool, bool]]:
    """On devices and on hosts."""
    group, rank, found = dist.group.WORLD, dist.get_rank(), []
    assert group is not None
    for free, hosts, device, _ in ROOM:
        costs.free_device_bytes = lambda _, mine=free[rank]: mine
        costs.available_host_bytes = lambda mine=free[rank]: mine
        costs.node_identity = lambda host=hosts[rank]: host
        module = nn.Linear(500, 500, bias=False, device=device)  # 1 MB
        found.append((fits_on_devices(module, group, CPU), fits_on_hosts(module, group)))
    return found


def test_all_ranks_answer_alike() -> None:
    assert run_ranks(answers, 2) == [[answer for *_, answer in ROOM]] * 2


def test_free_memory_of_a_host_and_its_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_GROUPS", tmp_path)
    whole = available_host_bytes()
    assert 0 < whole < 1e15
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_host_bytes() == 2e6
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes() > 2e6


def gather_beside_parts() -> tuple[list[str], int]:
    """Where a divided module's parameters are after it was gathered; bytes that this took on the device."""
    group, device = dist.group.WORLD, torch.device("cuda", dist.get_rank())
    assert group is not None
    module = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(2))).to(device)
    ownership = Ownership({"0.weight": (0,), "1.weight": (1,)}, {})
    release(module, ownership, dist.get_rank())
    before = torch.cuda.memory_stats(device)["allocated_bytes.all.current"]
    unshard(GlobalView(module, ownership, group, device, Channel(group, device)), to=CPU)
    places = [parameter.device.type for parameter in module.parameters()]
    return places, torch.cuda.memory_stats(device)["allocated_bytes.all.current"] - before


@pytest.mark.simulated_cuda
def test_other_ranks_parameters_come_to_the_host() -> None:
    (first, first_bytes), (second, second_bytes) = run_ranks(gather_beside_parts, 2, backend="nccl")
    assert (first, second) == (["cuda", "cpu"], ["cpu", "cuda"])
    assert (first_bytes, second_bytes) == (0, 0)
