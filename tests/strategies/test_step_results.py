from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_trainer_ranks
from tests.strategies.noisy_module import InMicroBatches, NoisyModule, TwoStages, assert_same, history


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return history("auto", NoisyModule())


@pytest.mark.parametrize("count", [1, 3, 4])
def test_one_process_in_microbatches_shows_what_whole_batches_show(count: int, expected: dict[str, Any]) -> None:
    assert_same(history(InMicroBatches(count)), expected)


def body_of_stages(pipelines: list[list[int]], count: int) -> dict[str, Any]:
    devices, replicas = sum(map(len, pipelines)), len(pipelines)
    # Lightning's sampler for training shuffles.
    return history(TwoStages(pipelines, count), devices=devices, use_distributed_sampler=replicas > 1)


def body_of_ddp(world_size: int) -> dict[str, Any]:
    return history("ddp", devices=world_size)


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
def test_every_rank_of_a_pipeline_shows_what_one_process_shows(expected: dict[str, Any]) -> None:
    for actual in run_trainer_ranks(body_of_stages, 2, [[0, 1]], 3):
        assert_same(actual, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")
def test_two_pipelines_show_what_two_replicas_show() -> None:
    replicas = run_trainer_ranks(body_of_ddp, 2, 2)
    ranks = run_trainer_ranks(body_of_stages, 4, [[0, 1], [2, 3]], 2, timeout=90)
    for rank, actual in enumerate(ranks):
        assert_same(actual, replicas[rank // 2])
