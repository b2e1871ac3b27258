"""What messages between stages cost."""

from __future__ import annotations

import pytest

from lightning_smddp.pipeline.mesh import PipelineMesh
from lightning_smddp.pipeline.partition.costs import LOOPBACK, NETWORK, NVLINK, links_between
from lightning_smddp.planner.partition import best_partition
from lightning_smddp.planner.problem import Link, NodeCost, PartitionProblem


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


@pytest.mark.parametrize(("link", "cut"), [(LOOPBACK, 4), (Link(1.5e-5, 1.5e11, unhidden=0.0), 3)])
def test_cuts_avoid_wide_places_where_that_pays(link: Link, cut: int) -> None:
    """6 layers of 3 ms: 40 MB take 20 ms on the cores of a CPU machine, and nothing that is seen on a device."""
    items = [NodeCost(f"net.{index}", 1e-3, 2e-3, 0) for index in range(6)]
    crossing = [0, 4e7, 4e7, 4e7, 1e5, 4e7, 0]
    assert best_partition(PartitionProblem(items, {}, crossing, [0, 1], [2, 1], links=[link])).cuts == (cut,)
