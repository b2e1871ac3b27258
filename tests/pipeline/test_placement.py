from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_smddp.pipeline.mesh import Groups, PipelineMesh
from tests.ranks import run_ranks


def test_cluster_puts_a_pipeline_on_neighbouring_ranks() -> None:
    assert PipelineMesh.of(8, 4, "cluster").pipelines == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert PipelineMesh.of(8, 4, "cluster").data_parallel_ranks == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_spread_puts_the_replicas_of_a_stage_on_neighbouring_ranks() -> None:
    assert PipelineMesh.of(8, 4, "spread").pipelines == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert PipelineMesh.of(8, 4, "spread").data_parallel_ranks == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_find_is_the_inverse() -> None:
    for placement in ("cluster", "spread"):
        grid = PipelineMesh.of(12, 3, placement)
        for rank in range(12):
            replica, place = grid.find(rank)
            assert grid.pipelines[replica][place] == rank


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
