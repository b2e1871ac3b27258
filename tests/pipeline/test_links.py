"""What messages between stages cost, and that all ranks plan by the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_smddp.pipeline.partition import hardware
from lightning_smddp.pipeline.partition.hardware import LOOPBACK, find_links
from lightning_smddp.pipeline.partition.mesh import Groups, PipelineMesh
from lightning_smddp.planner.partition import best_partition
from lightning_smddp.planner.problem import Link, NodeCost, PartitionProblem
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def found_links(rank_of_stage: list[int], hosts: list[str]) -> list[Link]:
    """On ranks that say they are on ``hosts``."""
    assert dist.group.WORLD is not None
    groups = Groups.create(PipelineMesh.of(dist.get_world_size(), max(rank_of_stage) + 1))
    hardware.node_identity = lambda: hosts[dist.get_rank()]
    return list(find_links(groups.pipeline, rank_of_stage, CPU, dist.group.WORLD))


def test_links_are_measured_between_hosts_and_the_same_on_all_ranks() -> None:
    everyones = run_ranks(found_links, 4, [0, 1, 1, 0], ["a", "a", "a", "b"])
    assert all(each == everyones[0] for each in everyones)
    slow, none, back = everyones[0]
    assert slow == back  # of the second pipeline, which spans hosts
    assert none == Link(0.0, float("inf"), 0.0)
    assert slow.latency_s > 0
    assert 0 < slow.bytes_per_s < 1e12
    assert 0 < slow.unhidden <= 1


def test_one_host_without_devices_is_known() -> None:
    assert run_ranks(found_links, 2, [0, 1], ["a", "a"]) == [[LOOPBACK], [LOOPBACK]]


@pytest.mark.parametrize(("link", "cut"), [(LOOPBACK, 4), (Link(1.5e-5, 1.5e11, unhidden=0.0), 3)])
def test_cuts_avoid_wide_places_where_that_pays(link: Link, cut: int) -> None:
    """6 layers of 3 ms: 40 MB take 20 ms on the cores of a CPU machine, and nothing that is seen on a device."""
    items = [NodeCost(f"net.{index}", 1e-3, 2e-3, 0) for index in range(6)]
    crossing = [0, 4e7, 4e7, 4e7, 1e5, 4e7, 0]
    assert best_partition(PartitionProblem(items, {}, crossing, [0, 1], [2, 1], links=[link])).cuts == (cut,)
