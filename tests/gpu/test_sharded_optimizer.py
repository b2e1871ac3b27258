"""``shard="optimizer"`` on devices: the same training as on one device, and checkpoints that go on without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices import on_gpus
from tests.gpu.test_data_parallel import Item, check, on_devices
from tests.ranks import run_trainer_ranks
from tests.sharding.test_checkpoints import check_ways
from tests.strategies.learners import silent
from tests.strategies.pipeline_learners import Case, Matrix, name_of
from tests.strategies.test_pipeline_replicas import replicas
from tests.strategies.test_synchronisations import Silent, count_steps, table

SHARDED = {"shard": "optimizer"}
ITEMS = [
    Item("plain", SHARDED),
    Item("clipping by norm", SHARDED, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    Item("16-mixed with an overflow", SHARDED, {"gradient_clip_val": 0.5}, 5e-3, "overflows"),
]
PIPELINES = Matrix([replicas(SHARDED, accumulate_grad_batches=2, gradient_clip_val=0.1)], 4, timeout=110)


RUNS = {
    "overflow": (ITEMS[2:], "aa", [pytest.mark.slow]),
    "rest": (ITEMS[:2], "aa", [pytest.mark.exhaustive]),
    "two nodes": (ITEMS[1:2], "aabb", [pytest.mark.slow]),
    "two nodes, rest": (ITEMS[:1], "aabb", [pytest.mark.exhaustive]),
}


@on_devices(RUNS)
def test_the_same_training(items: list[Item], nodes: str, device: str) -> None:
    check(items, nodes)


@pytest.mark.slow
@on_gpus(4)
@pytest.mark.parametrize("case", PIPELINES.cases, ids=name_of)
def test_replicas_of_pipelines(case: Case, device: str) -> None:
    PIPELINES.compare(case)


@pytest.mark.slow
@on_gpus(2)
@pytest.mark.parametrize("case", ["convolution", pytest.param("factored", marks=pytest.mark.exhaustive)])
def test_checkpoints_go_on_with_it_and_without(case: str, device: str, tmp_path: Path) -> None:
    check_ways(case, tmp_path, of_shard=(1e-5, 1e-5))


def count_waits() -> list[object]:
    return [count_steps(strategy, Silent()) for strategy in ("ddp", silent(shard="optimizer"))]


@pytest.mark.simulated_cuda
def test_the_host_waits_no_more_than_without_it() -> None:
    for stock, sharded in run_trainer_ranks(count_waits, 2):
        assert sharded.total() <= stock.total() + 1, f"ddp:\n{table(stock)}\nsharded:\n{table(sharded)}"
