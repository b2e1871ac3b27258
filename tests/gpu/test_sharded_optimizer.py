"""``shard="optimizer"`` on devices: the same training as on one device, and checkpoints that go on without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.devices import on_gpus
from tests.gpu.test_data_parallel import Group, Item, check
from tests.ranks import run_trainer_ranks
from tests.sharding.test_shard_optimizer import AdafactorLearner, AdamLearner, save_and_go_on
from tests.strategies.learners import silent
from tests.strategies.pipeline_learners import Case, Matrix, assert_same, name_of
from tests.strategies.test_pipeline_replicas import replicas
from tests.strategies.test_synchronisations import Silent, count_steps, table

SHARDED = {"shard": "optimizer"}
ITEMS = [
    Item("plain", SHARDED),
    Item("clipping by norm", SHARDED, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    Item("16-mixed with an overflow", SHARDED, {"gradient_clip_val": 0.5}, 5e-3, "overflows"),
]
PIPELINES = Matrix([replicas(SHARDED, accumulate_grad_batches=2, gradient_clip_val=0.1)], 4, timeout=110)


@pytest.mark.slow
@on_gpus(2)
@pytest.mark.parametrize(
    "items", [ITEMS[2:], pytest.param(ITEMS[:2], marks=pytest.mark.exhaustive)], ids=["overflow", "rest"]
)
def test_two(items: list[Item], device: str) -> None:
    """The rest: on two nodes."""
    check(Group(items, 2))


@pytest.mark.slow
@on_gpus(4)
@pytest.mark.parametrize(
    "items", [ITEMS[1:2], pytest.param(ITEMS[:1], marks=pytest.mark.exhaustive)], ids=["clipping", "plain"]
)
def test_two_nodes_of_two(items: list[Item], device: str) -> None:
    check(Group(items, 4, ["a", "a", "b", "b"]))


@pytest.mark.slow
@on_gpus(4)
@pytest.mark.parametrize("case", PIPELINES.cases, ids=name_of)
def test_replicas_of_pipelines(case: Case, device: str) -> None:
    PIPELINES.compare(case)


@pytest.mark.slow
@on_gpus(2)
@pytest.mark.parametrize("make", [AdamLearner, pytest.param(AdafactorLearner, marks=pytest.mark.exhaustive)])
def test_checkpoints_go_on_with_it_and_without(make: type, device: str, tmp_path: Path) -> None:
    for found in run_trainer_ranks(save_and_go_on, 2, str(tmp_path), make):
        expected = found.pop("at once").weights
        for way, outcome in found.items():
            assert_same(outcome.weights, expected, 1e-5, way)
    whole, sharded = (torch.load(tmp_path / f"{shard}.ckpt", weights_only=True) for shard in (None, "optimizer"))
    torch.testing.assert_close(
        sharded["optimizer_states"], whole["optimizer_states"], rtol=1e-5, atol=1e-6, check_device=False
    )


def count_waits() -> list[object]:
    return [count_steps(strategy, Silent()) for strategy in ("ddp", silent(shard="optimizer"))]


@pytest.mark.simulated_cuda
def test_the_host_waits_no_more_than_without_it() -> None:
    for stock, sharded in run_trainer_ranks(count_waits, 2):
        assert sharded.total() <= stock.total() + 1, f"ddp:\n{table(stock)}\nsharded:\n{table(sharded)}"
