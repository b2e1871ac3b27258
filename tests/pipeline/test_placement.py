"""Which ranks are a pipeline, which are replicas, and what messages between them cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_smddp.pipeline.mesh import Groups, PipelineMesh
from lightning_smddp.pipeline.partition.costs import LOOPBACK, NETWORK, NVLINK, links_between
from lightning_smddp.planner.problem import Link
from tests.ranks import run_ranks


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
    groups = Groups.create(PipelineMesh.of(4, 2, placement))
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
