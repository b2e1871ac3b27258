"""All ranks stop at one step, or soon, whatever their training threads do."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_smddp.supervision.stop import Stops
from lightning_smddp.supervision.supervisor import Supervisor
from tests.leaks import live_processes
from tests.rank_processes import forked
from tests.supervision.jobs import Rank, run


def terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def rounds_of_stops(rounds: int, rank: Rank) -> list[int]:
    """In each round some ranks get a signal, at random times, while all run with random delays."""
    chance, common, stops = random.Random(rank.rank), random.Random(0), []
    for _ in range(rounds):
        dist.barrier()
        watching = Supervisor(rank.store, rank.rank, rank.world_size, 60.0, 60.0)
        rank.supervisor.stops.restore_signals()
        watching.stops.take_signals()
        asking = common.sample(range(rank.world_size), common.randint(1, rank.world_size))
        timer = threading.Timer(chance.random() * 0.3, terminate_self)
        in_step = common.random() < 0.5
        if rank.rank in asking:
            timer.start()
        step = first = common.choice([0, 1, 1000])
        while not watching.gate(step):
            if in_step:
                dist.all_reduce(torch.ones(1))
            time.sleep(chance.random() * 0.004)
            step += 1
        stops.append(step - first)
        if rank.rank in asking:
            timer.join()
        watching.close()
    return stops


@pytest.mark.parametrize(
    "rounds", [pytest.param(4, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.exhaustive)]
)
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, rounds: int) -> None:
    first, *others = run(partial(rounds_of_stops, rounds), 3, tmp_path).results
    assert len(first) == rounds
    assert others == [first, first]


def signal_twice(rank: Rank) -> int:
    if rank.rank == 0:
        for seconds in (0.3, 0.8):
            threading.Timer(seconds, terminate_self).start()
    return rank.steps({}, steps=1000, pause=3.0)


@pytest.mark.slow
def test_signals_within_a_second_are_one(tmp_path: Path) -> None:
    ended = run(signal_twice, 2, tmp_path)
    assert ended.results[0] == ended.results[1] >= 0
    assert ended.written == ["", ""]


def stop_behind_others(rank: Rank) -> list[bool]:
    """Rank 1 has ended its run and left when rank 0 gets a signal."""
    if rank.rank == 1:
        return []
    while rank.supervisor._board.beats[1].over < 2:
        time.sleep(0.1)
    terminate_self()
    while not rank.supervisor.own.signal:
        time.sleep(0.1)
    return [rank.supervisor.gate(step) for step in range(3)]


@pytest.mark.slow
def test_a_rank_that_has_ended_its_run_need_not_answer(tmp_path: Path) -> None:
    assert run(stop_behind_others, 2, tmp_path).results[0][1:] == [True, True]


class Endless(Dataset[int]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: int) -> int:
        self.path.touch()
        time.sleep(60.0)
        return index

    def __len__(self) -> int:
        return 1


def killed_with_a_worker(directory: Path) -> None:
    stops = Stops()
    stops.take_signals()
    batches = iter(DataLoader(Endless(directory / "begun"), num_workers=1, multiprocessing_context="fork"))
    while not (directory / "begun").exists():
        time.sleep(0.01)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    (directory / "pids").write_text(f"{worker.pid} {os.getpgid(worker.pid)}")
    os.kill(os.getpid(), signal.SIGKILL)
    next(batches)


def test_a_loaders_worker_has_a_process_group_of_its_own_and_ends_with_its_rank(tmp_path: Path) -> None:
    """Also a busy one, which torch would let go on."""
    rank = forked(killed_with_a_worker, tmp_path)
    rank.join(30.0)
    worker, group = map(int, (tmp_path / "pids").read_text().split())
    assert (rank.exitcode, group) == (-signal.SIGKILL, worker)
    deadline = time.monotonic() + 10.0
    while any(process.pid == worker for process in live_processes()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
