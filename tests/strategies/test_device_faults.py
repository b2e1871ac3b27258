"""On simulated CUDA devices: a rank fails, and all of them end in time, naming it."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_smddp import PipelineStrategy
from tests import devices, rank_processes, simulated_cuda
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, fit, silent
from tests.strategies.pipeline_learners import Net

pytestmark = pytest.mark.simulated_cuda

LIMIT_S = 3.0  # collective_timeout
END_S = 10.0  # from the verdict to the last process's end
STEP = 2


class Faulty(Callback):
    """One rank fails at one step."""

    def __init__(self, kind: str, directory: Path, faulty: int = 1) -> None:
        self.kind, self.directory, self.faulty = kind, directory, faulty

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP and trainer.global_rank == self.faulty:
            torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self.strike())

    def strike(self) -> None:
        if (self.directory / "struck").exists():
            return
        (self.directory / "struck").write_text(str(time.time()))
        if self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "raises":
            raise KeyError("the first cause")
        elif self.kind == "hangs in a kernel":
            devices.hang()
        elif self.kind == "hangs on the host":
            time.sleep(100)


def train(strategy: str, kind: str, directory: str) -> None:
    rank = os.environ["RANK"]
    os.dup2(os.open(f"{directory}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    if devices.kind() == "simulated":
        simulated_cuda.limit_waits(100.0)
    # Else hosts come to wait in the look for NaN, which is a call of the package.
    options = {"on_nonfinite": "ignore"} if kind == "hangs in a kernel" else {}
    made, module = strategy_and_module(strategy, LIMIT_S, **options)
    fit(made, module, max_epochs=1, callbacks=[Faulty(kind, Path(directory))])


@dataclass
class Ended:
    """How a job has ended: each rank's traceback or end, and what it wrote; seconds from the fault on."""

    ends: dict[int, str]
    written: dict[int, str]
    seconds: float

    def everything(self, rank: int) -> str:
        return self.ends[rank] + self.written[rank]


def run(strategy: str, kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    monkeypatch.setattr(rank_processes, "GRACE_S", END_S + LIMIT_S)
    with pytest.raises(RanksFailedError) as caught:
        run_trainer_ranks(train, 2, strategy, kind, str(directory))
    seconds = time.time() - float((directory / "struck").read_text())
    assert caught.value.hung == {}
    written = {rank: (directory / f"{rank}.err").read_text() for rank in (0, 1)}
    return Ended(caught.value.tracebacks, written, seconds)


def strategy_and_module(strategy: str, limit_s: float, **options: Any) -> tuple[Any, Any]:
    if strategy == "smddp":
        return silent(collective_timeout=limit_s, **options), Learner()
    return PipelineStrategy(**grouped(verbose=False, collective_timeout=limit_s, **options)), Net()


# The supervision of the two is one: which of them is enough where a kind of fault takes no other way. `tests/gpu` has
# both, and what needs no device: a rank that stops, and a data-parallel one that hangs in a kernel.
DATA_PARALLEL = pytest.mark.parametrize("strategy", ["smddp"])
PIPELINE = pytest.mark.parametrize("strategy", ["smddp_pipeline"])
NAMED = r"[Rr]ank 1 \(host \S+, process \d+\) "


@PIPELINE
def test_a_rank_that_dies(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run(strategy, "dies", tmp_path, monkeypatch)
    assert re.search(
        NAMED + r"died( at step \d)? \(\w+\): its process (ended|was killed by SIGKILL)", ended.everything(0)
    )
    assert "RankFailedError: Rank 1" in ended.ends[0]
    assert ended.seconds < END_S


@pytest.mark.slow
@DATA_PARALLEL
def test_a_rank_that_raises(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run(strategy, "raises", tmp_path, monkeypatch)
    assert "KeyError: 'the first cause'" in ended.ends[1]
    assert re.search("RankFailedError: " + NAMED + r"failed at step 2 \(forward\): KeyError: 'the first", ended.ends[0])
    assert ended.seconds < END_S


def a_rank_that_stops(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run(strategy, "stops", tmp_path, monkeypatch)
    assert re.search("RankFailedError: " + NAMED + r"fell silent( at step \d)? \(\w+\): its process", ended.ends[0])
    assert ended.seconds < LIMIT_S + END_S


def a_kernel_that_hangs(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing raises by itself; both hosts wait for their devices, and may have come to the same point."""
    ended = run(strategy, "hangs in a kernel", tmp_path, monkeypatch)
    for rank in (0, 1):
        assert re.search(r"Rank \d \(host \S+, process \d+\) (did not come|failed) at step 2", ended.everything(rank))
        assert re.search("its device has work left|no rank is behind.* flight recorder", ended.everything(rank))
    assert ended.seconds < 2 * LIMIT_S + END_S


@pytest.mark.slow
@DATA_PARALLEL
def test_a_host_that_hangs(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run(strategy, "hangs on the host", tmp_path, monkeypatch)
    named = NAMED + r"did not come at step 2 \(forward\): rank 0"
    assert re.search(named, ended.everything(0))
    # Of a pipeline the rank that waits may be in C code that nothing reaches, and is ended by force.
    assert strategy != "smddp" or re.search("RankFailedError: " + named, ended.ends[0])
    assert "its host does not go on" in ended.everything(1)
    assert ended.seconds < 2 * LIMIT_S + END_S


# ---- after a failure ----


def fit_again() -> list[Any]:
    """After a run whose groups were aborted, in the same processes."""
    with pytest.raises((KeyError, RuntimeError)):
        fit(silent(), Learner(), max_epochs=1, callbacks=[Raising()])
    return fit(silent(), Learner(), max_epochs=1).losses


class Raising(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP and trainer.global_rank == 1:
            raise KeyError("the first cause")


@pytest.mark.slow
def test_groups_that_were_aborted_are_made_anew() -> None:
    for losses in run_trainer_ranks(fit_again, 2):
        assert len(losses) > STEP
