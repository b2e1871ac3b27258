"""Faults while a checkpoint is written, data that differs between ranks, NaN, and what a dead job leaves behind."""

from __future__ import annotations

import gc
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from lightning_smddp.communication.objects import RankFailedError
from tests.faults.case import Case
from tests.faults.checks import assert_ended, assert_named, assert_saved
from tests.faults.injection import Fault
from tests.faults.jobs import job, outcome, run
from tests.leaks import shared_memory
from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, make_trainer, silent

pytestmark = pytest.mark.slow
PP = "smddp_pipeline"


# ---- while saving ----


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("strategy", "launcher", "rank"),
    [
        (PP, "script", 0),
        pytest.param("smddp", "torchrun", 0, marks=pytest.mark.exhaustive),
        pytest.param(PP, "script", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_killed_while_saving(strategy: str, launcher: str, rank: int, tmp_path: Path) -> None:
    """And a job starts from what is there, at the same port."""
    port = free_port() if launcher == "script" else None
    result = run(Case([Fault(rank, 5, "kill", "save")], strategy, launcher, save_every=3, port=port), tmp_path)
    assert_ended(result)
    assert_named(result, rank, "(?:its process ended|killed by SIGKILL)", ["checkpoint", "data"])
    assert_saved(result)
    again = Case(strategy=strategy, steps=9, save_every=3, resume=str(result.checkpoints[-1]), port=port)
    resumed = run(again, tmp_path / "again")
    assert resumed.code == 0, resumed.describe()


@pytest.mark.parametrize(
    ("kind", "strategy", "launcher", "cause"),
    [
        ("full", "smddp", "script", "File too large: could not save a checkpoint"),
        pytest.param("removed", PP, "spawn", "could not save a checkpoint", marks=pytest.mark.exhaustive),
        pytest.param("raise", PP, "torchrun", "ZeroDivisionError", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_cannot_save(kind: str, strategy: str, launcher: str, cause: str, tmp_path: Path) -> None:
    result = run(Case([Fault(0, 5, kind, "save")], strategy, launcher, save_every=3), tmp_path)
    assert_ended(result)
    for rank in range(2):
        assert cause in result.said_by(rank) + result.main_stderr, result.describe()
    assert_saved(result, at_least=0 if kind == "removed" else 1)


# ---- data ----


@pytest.mark.parametrize(
    ("batches", "stream", "launcher", "validates"),
    [
        ([10, 20], False, "script", {}),
        ([20, 10], True, "script", {"limit_val_batches": 2, "val_check_interval": 10}),
        pytest.param([20, 10], True, "torchrun", {}, marks=pytest.mark.exhaustive),
        pytest.param([10, 20], True, "spawn", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_uneven(batches: list[int], stream: bool, launcher: str, validates: dict[str, int], tmp_path: Path) -> None:
    """Also where the longer epoch goes on with a validation."""
    trainer = {"use_distributed_sampler": False, **validates}
    case = Case(launcher=launcher, batches=batches, stream=stream, trainer=trainer)
    result = run(case, tmp_path)
    assert result.code not in (0, None), result.describe()
    assert not [path for path in result.left if "torch" not in path], result.describe()
    for rank in range(2):
        said = result.said_by(rank) + result.main_stderr
        assert re.search("equally many batches|numbers of training batches", said), result.describe()
        assert "10" in said, result.describe()


@pytest.mark.parametrize(
    ("strategy", "launcher"), [("smddp", "script"), pytest.param(PP, "script", marks=pytest.mark.exhaustive)]
)
def test_nan(strategy: str, launcher: str, tmp_path: Path) -> None:
    options = {"algorithm": "shared_memory"}
    result = run(Case([Fault(1, 5, "nan", "backward")], strategy, launcher, options=options), tmp_path)
    assert_ended(result)
    for rank in range(2):
        assert "not finite in step 5" in result.said_by(rank), result.describe()
        assert "on rank 1 (host" in result.said_by(rank), result.describe()


# ---- one job after or beside another ----


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """The end of one does not touch the other."""
    other, segments = Case(steps=100), shared_memory()
    with job(other, tmp_path / "other"):
        killed = run(Case([Fault(1, 5, "kill", "comm")]), tmp_path / "killed")
    assert_ended(killed)
    result = outcome(other, tmp_path / "other", segments)
    assert result.code == 0, result.describe()
    assert all(events[-1]["event"] == "finished" for events in result.events.values()), result.describe()


# ---- one process, several runs ----


class Failing(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise ZeroDivisionError("on all ranks")
        return super().training_step(batch, batch_idx)


class Validating(Learner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def descriptors_after_runs(rounds: int) -> list[int]:
    """Fit, fit again, validate, and a fit that fails; how many descriptors are open after each round."""
    counts = []
    for _ in range(rounds):
        model = Validating()
        trainer = make_trainer(silent(), limit_train_batches=3, limit_val_batches=1)
        trainer.fit(model)
        trainer.fit_loop.max_epochs += 1
        trainer.fit(model)
        trainer.validate(model)
        with pytest.raises((ZeroDivisionError, RankFailedError)):  # the other rank's may come first
            make_trainer(silent()).fit(Failing())
        del model, trainer
        gc.collect()  # tracebacks hold the frames of the failed run
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_runs_in_one_process_free_what_they_took() -> None:
    for counts in run_trainer_ranks(descriptors_after_runs, 2, 3):
        assert counts[2] <= counts[1], counts  # the first round opens what stays for good
