"""Which ranks are a pipeline, which are replicas, what messages between them cost, and whether there is room."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.pipeline.mesh import Groups, Ownership, PipelineMesh
from lightning_smddp.pipeline.partition import costs
from lightning_smddp.pipeline.partition.costs import (
    LOOPBACK,
    NETWORK,
    NVLINK,
    available_host_bytes,
    fits_on_devices,
    fits_on_hosts,
    links_between,
)
from lightning_smddp.pipeline.state.meta_parameters import release
from lightning_smddp.pipeline.state.state_dict import unshard
from lightning_smddp.pipeline.view.view import GlobalView
from lightning_smddp.planner.problem import Link
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("placement", "pipelines", "replicas"),
    [
        ("cluster", ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("spread", ((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_neighbouring_ranks_are_a_pipeline_or_replicas(placement: str, pipelines: Any, replicas: Any) -> None:
    mesh = PipelineMesh.of(8, 4, placement)
    assert (mesh.pipelines, mesh.data_parallel_ranks) == (pipelines, replicas)


def test_sizes_have_to_fit() -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=3 does not divide the world size 8.*1, 2, 4, 8"):
        PipelineMesh.of(8, 3)
    with pytest.raises(ValueError, match=r"placement='near' is unknown.*'cluster'.*'spread'"):
        PipelineMesh.of(8, 2, "near")


def report_groups(placement: str) -> tuple[list[int], list[int]]:
    groups = Groups.create(PipelineMesh.of(4, 2, placement), timedelta(minutes=5), CPU)
    dist.barrier()  # who left before another rank has connected to it would make that one fail
    return dist.get_process_group_ranks(groups.pipeline), dist.get_process_group_ranks(groups.data_parallel_group)


def test_groups_follow_the_grid() -> None:
    assert run_ranks(report_groups, 4, "spread") == [
        ([0, 2], [0, 1]),
        ([1, 3], [0, 1]),
        ([0, 2], [2, 3]),
        ([1, 3], [2, 3]),
    ]


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
    unshard(GlobalView(module, ownership, group, device), to=CPU)
    places = [parameter.device.type for parameter in module.parameters()]
    return places, torch.cuda.memory_stats(device)["allocated_bytes.all.current"] - before


@pytest.mark.simulated_cuda
def test_other_ranks_parameters_come_to_the_host() -> None:
    (first, first_bytes), (second, second_bytes) = run_ranks(gather_beside_parts, 2, backend="nccl")
    assert (first, second) == (["cuda", "cpu"], ["cpu", "cuda"])
    assert (first_bytes, second_bytes) == (0, 0)
