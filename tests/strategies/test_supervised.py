"""The run that a strategy watches, at its edges: errors, signals and deaths at unusual moments, more than one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_smddp import SMDDPStrategy
from lightning_smddp.communication.objects import RankFailedError
from lightning_smddp.strategies.launchers import _watch_start
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, make_trainer, samples


def strategy(**options: Any) -> SMDDPStrategy:
    return SMDDPStrategy(**grouped(verbose=False, algorithm="native", **options))


class AtTheEnd(Learner):
    """Fails on rank 1 in the last hook of a run."""

    def teardown(self, stage: str) -> None:
        if self.global_rank == 1:
            raise ValueError("it could not write its part")


def ends_badly() -> str:
    with pytest.raises((RankFailedError, ValueError)) as caught:
        make_trainer(strategy()).fit(AtTheEnd(count=16))
    return str(caught.value)


@pytest.mark.slow
def test_an_error_of_a_last_hook_is_everyones() -> None:
    first, second = run_trainer_ranks(ends_badly, 2)
    assert second == "it could not write its part"
    assert "Rank 1 (host " in first
    assert "failed at step 3 (teardown): ValueError: it could not write its part" in first


class Signalled(Learner):
    """SIGTERM to rank 0 at step ``at``."""

    def __init__(self, at: int, count: int = 48) -> None:
        super().__init__(count=count)
        self.at = at

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        if self.trainer.global_step == self.at and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def stopped(model: Learner, **options: Any) -> tuple[int, int]:
    """The exit code, and the step."""
    trainer = make_trainer(strategy(stop_grace=20.0), **options)
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(model)
    return int(caught.value.code), int(trainer.global_step)


def signalled_in_the_last_batch() -> tuple[int, int]:
    """Of the run; the other rank passes the last place to stop at without having heard of it."""
    return stopped(Signalled(3, count=16))


def test_a_signal_in_the_last_batch_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would otherwise go on, to its tests perhaps."""
    monkeypatch.chdir(tmp_path)
    (code, step), other = run_trainer_ranks(signalled_in_the_last_batch, 2)
    assert code == 128 + signal.SIGTERM
    assert other == (code, step)


class FewerOnRankOne(IterableDataset[Any]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        return iter(samples(6 if torch.distributed.get_rank() == 1 else 10))


class Validating(Signalled):
    """In validations one rank has fewer batches than it says."""

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        return DataLoader(FewerOnRankOne(), batch_size=1)


def stops_behind_validations(directory: str) -> tuple[int, int]:
    options = {"max_epochs": 20, "val_check_interval": 2, "num_sanity_val_steps": 0, "limit_val_batches": 1.0}
    return stopped(Validating(5), default_root_dir=directory, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
def test_ranks_stop_at_one_step_where_a_validation_was_shorter_than_it_said(tmp_path: Path) -> None:
    (_, step), (_, other) = run_trainer_ranks(stops_behind_validations, 2, str(tmp_path))
    assert step == other < 40
    assert (tmp_path / "smddp-stop.ckpt").exists()


# ---- processes that a script has started ----


def test_a_rank_that_has_joined_may_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    thread = threading.Thread(target=_watch_start, args=(lambda: True, [process]))
    process.wait()
    thread.start()  # ends this process if it takes that for a failure
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_rank_that_ends_before_it_joins_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        _watch_start(lambda: False, [subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])])
    assert caught.value.code == 1
    assert "ended with exit code 3 before it joined the other ranks" in capfd.readouterr().err
