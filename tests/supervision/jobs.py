"""Ranks that may be killed: functions in processes of ``tests.ranks``, over a store that rank 0 serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smddp.supervision.supervisor import Supervisor
from tests import rank_processes
from tests.ranks import RanksFailedError, run_ranks


@dataclass
class Rank:
    """A rank, inside of its process. ``pids``: of all."""

    rank: int
    world_size: int
    directory: Path
    store: dist.Store
    supervisor: Supervisor
    pids: list[int]

    def steps(self, acts: dict[int, Callable[[Rank], Any]], steps: int = 40, pause: float = 0.0) -> int:
        """Steps with a collective in each, before which ``acts`` come. Returns the step where all stop."""
        supervisor = self.supervisor
        for step in range(steps):
            supervisor.begin_batch(step, step + 1)
            if supervisor.gate(step):
                return step
            time.sleep(pause)
            if step in acts:
                acts[step](self)
            supervisor.begin("backward")
            dist.all_reduce(torch.ones(1))
        return -1


@dataclass
class Ended:
    """How a job has ended. ``ends``: tracebacks, or how processes ended, of the ranks that failed."""

    results: list[Any]
    ends: dict[int, str]
    written: list[str]

    def said(self, rank: int) -> str:
        """By its error, or where it was ended by force."""
        return self.ends[rank] + self.written[rank]


def supervise(body: Callable[[Rank], Any], directory: str, limits: dict[str, float]) -> Any:
    """What a strategy does around a run."""
    rank, world_size, where = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(directory)
    os.dup2(os.open(where / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = _store(rank, where / "port")
    seconds = timedelta(seconds=limits.get("gloo", 60.0))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=seconds)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    supervisor = Supervisor(store, rank, world_size, limits.get("timeout", 60.0), limits.get("grace", 60.0))
    supervisor.stops.take_signals()
    try:
        result = body(Rank(rank, world_size, where, store, supervisor, pids))
    except BaseException as error:
        explained = supervisor.explain(error)
        supervisor.close()
        if explained is error:
            raise
        raise explained from error
    failure = supervisor.close()
    if failure is not None:
        raise failure.error()
    return result


def _store(rank: int, path: Path) -> dist.Store:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    while not path.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False, wait_for_workers=False)


def run(body: Callable[[Rank], Any], world_size: int, directory: Path, **limits: float) -> Ended:
    """Run ``body`` on each rank; ``limits``: ``gloo``, ``timeout`` and ``grace`` of collectives and the supervisor."""
    results, ends = [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "GRACE_S", 15.0)  # for all to end, from the first end on
        try:
            results = run_ranks(supervise, world_size, body, str(directory), limits, init=False, timeout=90.0)
        except RanksFailedError as error:
            if error.hung:
                raise
            ends = error.tracebacks
    return Ended(results, ends, [(directory / f"{rank}.err").read_text() for rank in range(world_size)])
