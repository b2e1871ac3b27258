"""On CUDA devices: one rank equals a plain Trainer, two ranks equal DDP over NCCL."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.learners import CLASSES, INPUTS, Learner, Outcome, assert_equal, fit, samples, silent

PRECISIONS = ["32-true", "16-mixed", "bf16-mixed"]


def on_cpu(result: Outcome) -> Outcome:
    """CUDA tensors do not travel between these processes."""
    return Outcome(result.losses, {name: value.cpu() for name, value in result.weights.items()}, result.metrics)


def fit_on_gpu(strategies: list[Any], options: dict[str, Any]) -> tuple[list[Outcome], str]:
    """Train under each strategy (a name, or arguments of ours)."""
    outcomes = []
    for strategy in strategies:
        chosen = strategy if isinstance(strategy, str) else silent(**strategy)
        outcomes.append(on_cpu(fit(chosen, Learner(), accelerator="gpu", **options)))
    return outcomes, dist.get_backend()


def fit_alone(options: dict[str, Any]) -> Outcome:
    return on_cpu(fit("auto", Learner(), accelerator="gpu", **options))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_gpu_equals_a_plain_trainer(precision: str) -> None:
    ((outcomes, backend),) = run_trainer_ranks(fit_on_gpu, 1, ["smddp"], {"precision": precision})
    (alone,) = run_trainer_ranks(fit_alone, 1, {"precision": precision})
    assert backend == "nccl"
    assert_equal(outcomes[0], alone)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_gpus_equal_ddp(precision: str) -> None:
    ours = ["smddp", *({"algorithm": name} for name in ("native", "hierarchical", "balanced"))]
    for (stock, *outcomes), backend in run_trainer_ranks(fit_on_gpu, 2, ["ddp", *ours], {"precision": precision}):
        assert backend == "nccl"
        for outcome in outcomes:
            assert_equal(outcome, stock)


def one_gpu_each(strategies: list[Any]) -> tuple[list[Outcome], str]:
    """Simulated nodes have local rank 0 each, and so the same device: take another one for the second node."""
    return fit_on_gpu(strategies, {"devices": [int(os.environ["RANK"])]})


@pytest.mark.gpus(2)
def test_two_gpus_of_two_simulated_nodes_equal_ddp() -> None:
    ours = ["smddp", *({"algorithm": name} for name in ("native", "hierarchical", "balanced"))]
    for (stock, *outcomes), _ in run_trainer_ranks(one_gpu_each, 2, ["ddp", *ours], node_ids=["a", "b"]):
        for outcome in outcomes:
            assert_equal(outcome, stock)


@pytest.mark.gpus(2)
def test_shared_memory_is_for_cpu_gradients() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_trainer_ranks(fit_on_gpu, 2, [{"algorithm": "shared_memory"}], {})
    assert sorted(caught.value.tracebacks) == [0, 1]
    for text in caught.value.tracebacks.values():
        assert "ValueError: algorithm='shared_memory' cannot be used" in text


class Deep(Learner):
    """With a unit for each of four stages."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            layers = [nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)]
            self.net = nn.Sequential(*layers)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.count), batch_size=self.batch_size)  # a pipeline is one replica


def deep_alone(options: dict[str, Any]) -> Outcome:
    return on_cpu(fit("auto", Deep(), accelerator="gpu", **options))


def pipeline_on_gpu(strategies: list[dict[str, Any]], options: dict[str, Any]) -> list[Outcome]:
    """Train under a pipeline with each of these arguments."""
    from lightning_smddp import PipelineStrategy

    made = [PipelineStrategy(verbose=False, **arguments) for arguments in strategies]
    return [on_cpu(fit(strategy, Deep(), accelerator="gpu", **options)) for strategy in made]


ONE_STAGE = {"num_microbatches": 2}
TWO_STAGES = {"num_microbatches": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2}
SCHEDULES = [
    TWO_STAGES,
    {**TWO_STAGES, "schedule": "interleaved_zero_bubble"},
    {"num_microbatches": 4, "schedule": "dualpipev"},
]


@pytest.mark.gpus(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_pipeline_on_one_gpu_equals_a_plain_trainer(precision: str) -> None:
    (outcomes,) = run_trainer_ranks(pipeline_on_gpu, 1, [ONE_STAGE, *SCHEDULES], {"precision": precision})
    (alone,) = run_trainer_ranks(deep_alone, 1, {"precision": precision})
    for outcome in outcomes:
        assert_weights_equal(outcome, alone, 1e-5 if precision == "32-true" else 2e-2)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_pipeline_on_two_gpus_equals_a_plain_trainer(precision: str) -> None:
    schedules = [ONE_STAGE, *SCHEDULES]
    (alone,) = run_trainer_ranks(deep_alone, 1, {"precision": precision})
    for outcomes in run_trainer_ranks(pipeline_on_gpu, 2, schedules, {"precision": precision}):
        for outcome in outcomes:
            assert_weights_equal(outcome, alone, 1e-5 if precision == "32-true" else 2e-2)


def assert_weights_equal(actual: Outcome, expected: Outcome, tolerance: float) -> None:
    """The module's own list of losses has the batch's losses under a pipeline only where its step ends."""
    torch.testing.assert_close(actual.weights, expected.weights, rtol=tolerance, atol=tolerance)
