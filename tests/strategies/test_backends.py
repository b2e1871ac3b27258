"""The process group's backend on GPUs; on CPUs the table of `test_messages.py` has it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, make_trainer, silent


def backend(given: str | None) -> tuple[str, str | None]:
    strategy = silent(process_group_backend=given)
    make_trainer(strategy, max_steps=1).fit(Learner())
    return dist.get_backend(), strategy.process_group_backend


@pytest.mark.simulated_cuda
@pytest.mark.parametrize("given", ["auto", "nccl"])
def test_gloo_beside_nccl_on_gpus(given: str) -> None:
    assert run_trainer_ranks(backend, 2, given) == [("cpu:gloo,cuda:nccl", "nccl")] * 2
