"""Jobs of Lightning's ``Trainer`` that take turns: each arm has ranks of its own, and one arm trains at a time.

``interleave`` of ``common.py`` runs all arms in the same processes, which only hand-written steps allow: a ``Trainer``
keeps its process from the begin of ``fit`` to its end.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from ddp_step import _proportional_set_size
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

GO, END = "go", "end"


@dataclass(frozen=True)
class Job:
    """An arm.

    Attributes:
        module: makes the LightningModule of a rank.
        strategy: makes the strategy.
    """

    module: Callable[[int], LightningModule]
    strategy: Callable[[], Any]


def train_in_turns(
    jobs: Mapping[str, Job], ranks: int, rounds: int, warmup: int = 2, block: int = 3
) -> tuple[dict[str, dict[str, list[float]]], dict[str, int], dict[str, list[float]]]:
    """Train all arms in rotation, ``block`` steps at a time, in a new random order each round.

    Returns:
        for each arm ``wall_ms`` and ``cpu_ms`` of a step for each turn (see ``interleave``); MiB of a rank, the largest
        at the end of a backward pass, less what there was before the model was built; and the losses of rank 0.
    """
    pipes, processes = _start(jobs, ranks, block)
    samples: dict[str, dict[str, list[float]]] = {name: {"wall_ms": [], "cpu_ms": []} for name in jobs}
    order = random.Random(0)
    try:
        for turn in range(-warmup, rounds):
            for name in order.sample(list(jobs), len(jobs)):
                spans = _each(pipes[name], GO)
                if turn >= 0:
                    wall = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
                    samples[name]["wall_ms"].append(1e3 * wall / block)
                    samples[name]["cpu_ms"].append(1e3 * sum(cpu for _, _, cpu in spans) / block)
        ends = {name: _each(pipes[name], END) for name in jobs}
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    memory = {name: round(max(used for used, _ in of_ranks) / 2**20) for name, of_ranks in ends.items()}
    return samples, memory, {name: of_ranks[0][1] for name, of_ranks in ends.items()}


def _start(jobs: Mapping[str, Job], ranks: int, block: int) -> tuple[dict[str, list[Connection]], list[Any]]:
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, list[Connection]] = {}
    processes: list[Any] = []
    for name, job in jobs.items():
        pipes[name], port = [], _free_port()
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_rank_main, args=(job, rank, ranks, port, theirs, block)))
            processes[-1].start()
            theirs.close()
            pipes[name].append(ours)
    return pipes, processes


def _each(pipes: Sequence[Connection], word: str) -> list[Any]:
    """Say ``word`` to all ranks of an arm, and return their answers."""
    for pipe in pipes:
        pipe.send(word)
    return [pipe.recv() for pipe in pipes]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank_main(job: Job, rank: int, ranks: int, port: int, pipe: Connection, block: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=f"turns-{port}")
    torch.set_num_threads(1)
    before = _proportional_set_size()
    module = job.module(rank)
    turns = _Turns(pipe, block)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=job.strategy(),
        callbacks=[turns],
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(range(10**6), batch_size=None))
    pipe.send((max(turns.memory) - before, turns.losses))


class _Turns(Callback):
    """Waits for this arm's turn before each block of steps."""

    def __init__(self, pipe: Connection, block: int) -> None:
        self.pipe, self.block = pipe, block
        self.memory: list[float] = [0.0]
        self.losses: list[float] = []
        self._start, self._cpu = 0.0, 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> int | None:
        """The end of ``fit`` is when this arm is told so."""
        if batch_idx % self.block:
            return None
        if batch_idx:
            self.pipe.send((self._start, time.perf_counter(), time.process_time() - self._cpu))
        if self.pipe.recv() == END:
            trainer.should_stop = True
            return -1
        self._start, self._cpu = time.perf_counter(), time.process_time()
        return None

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        """Measured in the first steps, which are not counted."""
        if trainer.global_step in (4, 5):
            self.memory.append(_proportional_set_size())

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Losses, to compare."""
        if batch_idx < 2 * self.block:
            self.losses.append(float(outputs["loss"]))
