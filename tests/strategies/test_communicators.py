"""On simulated CUDA devices: who makes communicators, and when."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_smddp import Compression
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.groups import connect_pairs, create_group, new_name
from tests import simulated_cuda
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, fit, silent
from tests.strategies.pipeline_learners import Bench, Net

pytestmark = pytest.mark.simulated_cuda
EXHAUSTIVE = pytest.mark.exhaustive

NODES = ["a", "a", "b", "b"]
COMMUNICATION: list[dict[str, Any]] = [
    *({"algorithm": name} for name in ("auto", "native", "hierarchical", "balanced")),
    *({"algorithm": "hierarchical", "compression": name} for name in ("fp16", "bf16", "int8")),
    {"compression": "powersgd"},
    {"algorithm": "balanced", "compression": Compression("bf16", scope="all")},
    {"algorithm": "native", "compression": "bf16"},
]
# Each algorithm with more than one level, each kind of state; the rest takes the same ways.
SOME = [COMMUNICATION[0], COMMUNICATION[7], COMMUNICATION[8]]
REST = [options for options in COMMUNICATION if options not in SOME]
EACH = [pytest.param(SOME, id="some"), pytest.param(REST, id="rest", marks=EXHAUSTIVE)]
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


def fit_data_parallel(communication: list[dict[str, Any]]) -> list[Found]:
    simulated_cuda.limit_waits(20.0)
    found = []
    for options in communication:
        fit(silent(**options), Learner(count=32), max_epochs=1)
        found.append(communicators())
    return found


def require_ready(everyones: list[list[Found]]) -> None:
    for found in everyones:
        counts = [count for count, _ in found]
        assert counts[0] > 0
        assert counts == sorted(counts)
        for _, wrong in found:
            assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("communication", EACH)
def test_smddp_makes_none_in_a_step(communication: list[dict[str, Any]]) -> None:
    require_ready(run_trainer_ranks(fit_data_parallel, 4, communication, node_ids=NODES, timeout=120))


def fit_replicas(communication: list[dict[str, Any]]) -> list[Found]:
    simulated_cuda.limit_waits(20.0)
    found = []
    for options in communication:
        bench = Bench({"pipeline_parallel_size": 2, **options})
        bench.fit(Net(count=16, batch_size=4), max_epochs=1)
        found.append(communicators())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("communication", [[*SOME, *REST]])
def test_pipelines_with_replicas_make_none_in_a_step(communication: list[dict[str, Any]]) -> None:
    require_ready(run_trainer_ranks(fit_replicas, 4, communication, node_ids=NODES, timeout=120))


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


def fit_others(schedules: bool) -> list[Found]:
    simulated_cuda.limit_waits(20.0)
    found = []
    cases: list[tuple[Net, dict[str, Any]]] = [
        (Tied(), {"pipeline_parallel_size": 2, **SOME[1]}),
        (Thawing(count=16, batch_size=4), {"pipeline_parallel_size": 2, "algorithm": "balanced"}),
    ]
    if schedules:
        cases = [
            (Tied(), {"schedule": "1f1b"}),
            (Net(layers=8), {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
            (Net(layers=8), {"schedule": "dualpipev"}),
        ]
    for model, options in cases:
        Bench(options).fit(model, max_epochs=2)
        found.append(communicators())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_tied_weights_and_schedules_and_places_without_gradients(schedules: bool) -> None:
    require_ready(run_trainer_ranks(fit_others, 4, schedules, node_ids=NODES, timeout=120))


def start() -> tuple[int, torch.device]:
    """The world's group, bound to a device as by the strategies; rank and device."""
    simulated_cuda.limit_waits(8.0)
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["WORLD_SIZE"]), device_id=device)
    return rank, device


def uneven() -> list[float]:
    """Places that take even numbers of ranks make more groups than the others."""
    rank, device = start()
    world, limit = dist.group.WORLD, timedelta(seconds=20)
    assert world is not None
    mine = [rank % 2, rank % 2 + 2]
    place = create_group(mine, f"{new_name(world)}-{rank % 2}", limit, device)
    communicator = Communicator(place, device, limit, apart=True)
    if rank % 2 == 0:
        for name in ("hierarchical", "balanced"):
            algorithm = communicator.algorithm(name, Compression("int8"))
            reduce_once(algorithm, torch.ones(5, device=device))
            algorithm.close()
    tensor = torch.full((3,), float(rank), device=device)
    dist.all_reduce(tensor)
    communicator.close()
    return [*tensor.tolist()]


@pytest.mark.slow
def test_places_may_make_different_numbers_of_groups() -> None:
    for tensor in run_trainer_ranks(uneven, 4, node_ids=NODES):
        assert tensor == [6.0] * 3


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


def through_neighbours() -> list[Tensor]:
    """Between three ranks, a send to one does not wait for a message of another one that was asked for before."""
    rank, device = start()
    group = create_group([0, 1, 2], "neighbours", timedelta(seconds=20), device, by_pairs=True)
    connect_pairs(group, [(0, 1), (1, 2), (0, 2)], device)
    mine, other = torch.full((2,), float(rank), device=device), torch.zeros(2, device=device)
    if rank == 1:
        received = dist.irecv(other, group=group, group_src=2)
        dist.isend(mine, group=group, group_dst=0)
        assert received is not None
        received.wait()
    elif rank == 0:
        dist.recv(other, group=group, group_src=1)
        dist.send(F.relu(other), group=group, group_dst=2)
    else:
        dist.recv(other, group=group, group_src=0)
        dist.send(other, group=group, group_dst=1)
    return other.cpu()


def test_messages_to_different_ranks_do_not_follow_each_other() -> None:
    for received in run_trainer_ranks(through_neighbours, 3):
        assert received.tolist() == [1.0, 1.0]
