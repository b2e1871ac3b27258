"""On simulated CUDA devices: who makes communicators, and when."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smddp import Compression
from lightning_smddp.communication.groups import create_group
from tests import simulated_cuda
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, fit, silent
from tests.strategies.pipeline_learners import Bench, Net

pytestmark = pytest.mark.simulated_cuda

NODES = ["a", "a", "b", "b"]
# Each algorithm with more than one level, each kind of state; the rest takes the same ways.
SOME: list[dict[str, Any]] = [
    {"algorithm": "auto"},
    {"compression": "powersgd"},
    {"algorithm": "balanced", "compression": Compression("bf16", scope="all")},
]
IN_A_STEP = {"average", "backward", "run_pipeline_schedule"}


Found = tuple[int, list[str]]


def communicators() -> Found:
    """How many this process has made; what was wrong with which."""
    from tests.simulated_cuda import nccl

    wrong = [f"{made.name} of all ranks: {made.functions[-25:]}" for made in nccl.made if made.by_split]
    wrong += [f"{made.name}: {made.functions[-25:]}" for made in nccl.made if is_late(made.functions)]
    return len(nccl.made), wrong


def is_late(functions: tuple[str, ...]) -> bool:
    """Whether a training step was under way; but a pipeline's first one partitions the module, where all is made."""
    return "optimizer_step" in functions and "_partition_by" not in functions or bool(IN_A_STEP.intersection(functions))


class Tied(Net):
    """Two layers share their weights."""

    def __init__(self) -> None:
        super().__init__(layers=6, count=16, batch_size=4)
        self.net[2].weight = self.net[8].weight


class Thawing(Net):
    """The last place trains nothing in the first epoch."""

    def configure_optimizers(self) -> Any:
        self.net[4:].requires_grad_(False)
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.requires_grad_(True)


def fit_all() -> list[Found]:
    simulated_cuda.limit_waits(20.0)
    found = []
    for communication in SOME:
        fit(silent(**communication), Learner(count=32), max_epochs=1)
        found.append(communicators())
    cases: list[tuple[Net, dict[str, Any]]] = [
        (Tied(), {"pipeline_parallel_size": 2, **SOME[1]}),
        (Thawing(count=16, batch_size=4), {"pipeline_parallel_size": 2, "algorithm": "balanced"}),
        (Tied(), {"schedule": "1f1b"}),
    ]
    for model, options in cases:
        Bench(options).fit(model, max_epochs=2)
        found.append(communicators())
    return found


@pytest.mark.slow
def test_none_is_made_in_a_step() -> None:
    """Also of a pipeline with tied weights, and with a place that trains nothing."""
    for found in run_trainer_ranks(fit_all, 4, node_ids=NODES, timeout=200):
        counts = [count for count, _ in found]
        assert counts[0] > 0
        assert counts == sorted(counts)
        for _, wrong in found:
            assert wrong == []


def start() -> tuple[int, torch.device]:
    """The world's group, bound to a device as by the strategies; rank and device."""
    simulated_cuda.limit_waits(8.0)
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["WORLD_SIZE"]), device_id=device)
    return rank, device


def late_member() -> str:
    rank, device = start()
    try:
        if rank == 0:
            create_group([0, 1], "nobody else comes", timedelta(seconds=0.5), device)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_member_that_does_not_come_is_named() -> None:
    message, _ = run_trainer_ranks(late_member, 2)
    assert "RankTimeoutError: Rank 1 did not come within 0.5 s to make the communicator of [0, 1]" in message
