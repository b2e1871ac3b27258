"""The process group's backend, and communication hooks of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_smddp import PipelineStrategy, SMDDPFabricStrategy, SMDDPStrategy
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, Outcome, assert_equal, fit, make_trainer, silent

# ---- backend ----


def test_the_closed_library_of_aws_is_refused_with_the_cure() -> None:
    said = "'smddp' is AWS's closed library.*PyTorch 2.4.* Leave process_group_backend out"
    for strategy in (SMDDPStrategy, SMDDPFabricStrategy, PipelineStrategy):
        with pytest.raises(ValueError, match=said):
            strategy(process_group_backend="smddp")


def backend(given: str | None) -> tuple[str, str | None]:
    strategy = silent(process_group_backend=given)
    make_trainer(strategy, max_steps=1).fit(Learner())
    return dist.get_backend(), strategy.process_group_backend


def test_gloo_on_cpu() -> None:
    assert run_trainer_ranks(backend, 2, None) == [("gloo", "gloo")] * 2


@pytest.mark.simulated_cuda
@pytest.mark.parametrize("given", ["auto", "nccl"])
def test_gloo_beside_nccl_on_gpus(given: str) -> None:
    assert run_trainer_ranks(backend, 2, given) == [("cpu:gloo,cuda:nccl", "nccl")] * 2


# ---- hooks ----


class Counting:
    def __init__(self) -> None:
        self.buckets = 0
        self.wrapped = 0


def counting_hook(state, bucket):  # DDP refuses annotations that are strings, as they are in this file
    state.buckets += 1
    return allreduce_hook(dist.group.WORLD, bucket)


def fit_with_hooks() -> tuple[list[Outcome], int, int, Any]:
    counting = Counting()

    def wrapper(hook: Any) -> Any:
        counting.wrapped += 1
        return hook

    strategies: list[Any] = [
        "ddp",
        silent(ddp_comm_hook=allreduce_hook),
        silent(ddp_comm_hook=counting_hook, ddp_comm_state=counting, ddp_comm_wrapper=wrapper, bucket_cap_mb=0.0001),
    ]
    outcomes = [fit(strategy, Learner()) for strategy in strategies]
    return outcomes, counting.buckets, counting.wrapped, strategies[-1].communication_report


@pytest.mark.slow
def test_a_hook_of_the_user_is_honoured_on_cpu() -> None:
    for (stock, plain, counted), buckets, wrapped, report in run_trainer_ranks(fit_with_hooks, 2):
        assert_equal(plain, stock)
        assert_equal(counted, stock)
        assert buckets > 12  # 12 steps; after the first, several buckets
        assert wrapped == 1
        assert report is None  # nothing of ours ran
