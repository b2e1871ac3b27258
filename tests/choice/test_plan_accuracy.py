"""What is predicted is what ranks then hold, within 15 %. ``benchmarks/plan_accuracy.py`` has more models."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_smddp import PipelineStrategy, SMDDPStrategy, plan
from tests.choice.modules import Wide
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer

STRATEGIES = {
    "smddp": (SMDDPStrategy, {}),
    "smddp, shard='optimizer'": (SMDDPStrategy, {"shard": "optimizer"}),
    "smddp_pipeline": (PipelineStrategy, {}),
}
RANKS, STEPS = 2, 2
_M_MMAP_THRESHOLD = -3  # of malloc.h


def held() -> int:
    """Bytes of this process that are no file's; of memory that ranks share each has its part."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return sizes["RssAnon"] + sizes["RssShmem"] // RANKS


@contextmanager
def watched(most: list[int], done: threading.Event) -> Iterator[None]:
    def look() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], held())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


class Ends(Callback):
    """Behind training a pipeline's model is gathered on hosts, if they have room: that is no part of it."""

    def __init__(self, done: threading.Event) -> None:
        self.done = done

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.done.set()


def measure(strategy: str) -> int:
    """What training adds at most to what a process has."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**18)  # what is freed is given back
    torch.set_num_threads(1)
    made, options = STRATEGIES[strategy]
    done = threading.Event()
    chosen = made(**grouped(verbose=False, **options))
    trainer = make_trainer(chosen, max_steps=STEPS, callbacks=[Ends(done)])
    most = [0]
    before = held()
    with watched(most, done):
        trainer.fit(Wide())
    return most[0] - before


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [list(STRATEGIES)[1:], pytest.param(list(STRATEGIES)[:1], marks=pytest.mark.exhaustive)],
    ids=["shared or divided", "copies"],
)
def test_ranks_hold_what_was_predicted(strategies: list[str]) -> None:
    found = plan(Wide(), RANKS, 4.0)
    predicted = {estimate.name: estimate.memory for estimate in found.estimates}
    for strategy in strategies:
        memory = predicted[strategy]
        assert memory is not None
        assert memory.total == pytest.approx(max(run_trainer_ranks(measure, RANKS, strategy)), rel=0.15), strategy
