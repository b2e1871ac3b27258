"""``resume="auto"``: a script that is started again goes on by itself."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_smddp import PipelineStrategy, RankFailedError, SMDDPStrategy
from lightning_smddp.checkpoint import files
from lightning_smddp.resume import exact_resume
from lightning_smddp.resume.auto_resume import STOP_CHECKPOINT, checkpoint_locations, stop_checkpoint
from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import RESUMING, Learner, make_trainer
from tests.strategies.resuming import Run, Scenario, differences, run

pytestmark = RESUMING

SCENARIO = Scenario(accumulate=2, validate=2, epochs=2)
SPLIT = ["net.3"]  # two runs that measure their modules may find two splits


def strategy(make: Any, **options: Any) -> Any:
    return make(**grouped(verbose=False, algorithm="native", resume="auto", **options))


class KillAt(Callback):
    def __init__(self, batch: int, rank: int) -> None:
        self.batch, self.rank = batch, rank

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.fit_loop.total_batch_idx >= self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def script(directory: str, kill: KillAt | None = None, resume: bool = True) -> Run:
    """What is started again and again: it knows nothing of the starts before."""
    callbacks = [ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")]
    kind = strategy(PipelineStrategy, split=SPLIT) if resume else {"split": SPLIT}
    return run(kind, SCENARIO, callbacks=[*callbacks, kill] if kill else callbacks)


def last_start(directory: str) -> tuple[int, int, list[str]]:
    """Batches of the last start and of a run that nobody killed, and what differs."""
    resumed = script(f"{directory}/killed")
    unbroken = script(f"{directory}/unbroken", resume=False)
    return len(resumed.seen), len(unbroken.seen), differences(resumed, unbroken)


@pytest.mark.slow
def test_a_pipeline_is_killed_and_started_again(tmp_path: Path) -> None:
    """Weights are as if nothing had happened."""
    with pytest.raises(RanksFailedError):
        run_trainer_ranks(script, 2, str(tmp_path / "killed"), KillAt(4, 1))
    for trained, all_batches, found in run_trainer_ranks(last_start, 2, str(tmp_path)):
        assert found == []
        assert 0 < trained < all_batches


# ---- what is chosen ----


def fit(
    directory: str, ckpt_path: str | None = None, epochs: int = 1, save_last: bool = True
) -> tuple[int, int, str | None]:
    """Steps, batches trained in this start, and the name of the checkpoint that it went on from."""
    model, saved = Learner(), ModelCheckpoint(directory, "{epoch}", save_top_k=-1, save_last=save_last)
    options = {"callbacks": [saved], "enable_checkpointing": True, "default_root_dir": directory}
    trainer = make_trainer(strategy(SMDDPStrategy), max_epochs=epochs, **options)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer.global_step, len(model.losses), trainer.ckpt_path and Path(trainer.ckpt_path).name


def from_scratch_then_on(directory: str) -> list[Any]:
    found = [fit(directory), fit(directory, epochs=3)]
    with mock.patch.object(exact_resume, "rank_zero_info") as said:
        found.append(fit(directory, epochs=3))
    assert "there was nothing to train" in str(said.call_args_list)
    return [*found, fit(directory, f"{directory}/epoch=0.ckpt", epochs=3)]


def with_a_broken_one(directory: str) -> Any:
    fit(directory, epochs=2, save_last=False)
    if os.environ["RANK"] == "0":  # which will look for checkpoints
        os.truncate(f"{directory}/epoch=1.ckpt", 1000)
    return fit(directory, epochs=2, save_last=False)


def not_shared(directory: str) -> str:
    """Rank 1 does not see the files (a test cannot take rights away from root)."""
    fit(directory)
    if os.environ["RANK"] == "1":
        files.load = lambda path, *options: open(f"{path}.gone").close()
    with pytest.raises((FileNotFoundError, RankFailedError)) as caught:
        fit(directory, epochs=2)
    return str(caught.value)


def choices(directory: str) -> list[Any]:
    """In one process of a rank, as starting it takes longer than they do."""
    cases = [from_scratch_then_on, with_a_broken_one, not_shared]
    return [case(f"{directory}/{case.__name__}") for case in cases]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_trainer_ranks(choices, 2, str(tmp_path_factory.mktemp("chosen")))


@pytest.mark.slow
def test_newest_one(chosen: list[Any]) -> None:
    """None at first; then the newest; nothing to do for a run that has finished; a given one has precedence."""
    for (first, second, third, given), _, _ in chosen:
        assert first == (3, 3, None)
        assert second[:2] == (9, 6)
        assert second[2] in ("epoch=0.ckpt", "last.ckpt")
        assert third[:2] == (9, 0)
        assert given == (9, 6, "epoch=0.ckpt")


@pytest.mark.slow
def test_passes_over_broken_ones(chosen: list[Any]) -> None:
    for _, found, _ in chosen:
        assert found == (6, 3, "epoch=0.ckpt")


@pytest.mark.slow
def test_directories_that_are_not_shared(chosen: list[Any]) -> None:
    """A rank that cannot read what rank 0 has chosen says so, and is named."""
    others, own = (found for _, _, found in chosen)
    assert re.match(r"Rank 1 \(host .*\) failed \(setup\): FileNotFoundError: .*\.ckpt\.gone'", others)
    assert re.search(r"No such file or directory: .*\.ckpt\.gone'", own)


def test_checkpoint_locations(tmp_path: Path) -> None:
    callbacks = [
        ModelCheckpoint("s3://bucket/checkpoints", monitor="a"),
        ModelCheckpoint(str(tmp_path / "weights"), save_weights_only=True, monitor="b"),
        ModelCheckpoint(str(tmp_path / "version_1" / "checkpoints")),
    ]
    (tmp_path / "version_0" / "checkpoints").mkdir(parents=True)
    (tmp_path / "hpc_ckpt_3.ckpt").touch()
    trainer = make_trainer("auto", callbacks=callbacks, enable_checkpointing=True, default_root_dir=tmp_path)
    assert checkpoint_locations(trainer) == [
        "s3://bucket/checkpoints",
        str(tmp_path / "version_1" / "checkpoints"),
        str(tmp_path / "version_0" / "checkpoints"),
        str(tmp_path / STOP_CHECKPOINT),
        str(tmp_path / "hpc_ckpt_3.ckpt"),
    ]
    assert stop_checkpoint(trainer) == f"s3://bucket/checkpoints/{STOP_CHECKPOINT}"
    alone = make_trainer("auto", default_root_dir=tmp_path)
    assert stop_checkpoint(alone) == str(tmp_path / STOP_CHECKPOINT)


def test_other_than_auto() -> None:
    with pytest.raises(ValueError, match="resume='last' is unknown. Valid: 'auto'"):
        SMDDPStrategy(resume="last")
