"""A job's folders: checkpoints that come back, the final model, and why it failed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import chdir
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_smddp import PipelineStrategy, SMDDPStrategy
from lightning_smddp.communication.objects import RankFailedError
from lightning_smddp.sagemaker.folders import Folders, failure_file, point_at, pointed_at, write_failure
from lightning_smddp.strategies import sagemaker_job
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import RESUMING, Learner, make_trainer
from tests.strategies.pipeline_learners import Net

pytestmark = RESUMING
STEPS = 3  # of an epoch of two ranks


def job(base: Path, hosts: int = 1, current: int = 1) -> dict[str, str]:
    names = [f"algo-{number + 1}" for number in range(hosts)]
    return {"SAGEMAKER_BASE_DIR": str(base), "SM_HOSTS": json.dumps(names), "SM_CURRENT_HOST": f"algo-{current}"}


# ---- without a Trainer ----


def test_folders(tmp_path: Path) -> None:
    assert Folders.of({}, 1) is None
    one = Folders.of(job(tmp_path), 1)
    assert one == Folders(tmp_path / "checkpoints", tmp_path / "model")
    together = Folders.of(job(tmp_path, hosts=2, current=2), 2)
    assert together == Folders(tmp_path / "checkpoints", tmp_path / "model")
    second = Folders.of(job(tmp_path), 1, number=2)
    assert second == Folders(tmp_path / "checkpoints" / "trainer2", tmp_path / "model" / "trainer2")
    alone = Folders.of(job(tmp_path, hosts=2, current=2), 1)
    assert alone == Folders(tmp_path / "checkpoints" / "algo-2", tmp_path / "model" / "algo-2")


def test_the_first_failure_of_a_host_stays(tmp_path: Path) -> None:
    path = tmp_path / "output" / "failure"
    write_failure(path, "first " * 1000, since=time.time() - 60)
    write_failure(path, "second", since=time.time() - 60)
    assert path.read_text() == ("first " * 1000)[:1024]
    os.utime(path, (1, 1))
    write_failure(path, "of another start \ud800", since=time.time() - 60)
    assert path.read_text() == "of another start ?"
    assert [entry.name for entry in path.parent.iterdir()] == ["failure"]


def test_failure_file_of_a_job_with_broken_files(tmp_path: Path) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    assert failure_file({"SAGEMAKER_BASE_DIR": str(tmp_path)}) is None
    (config / "resourceconfig.json").write_text("{")
    assert failure_file({"SAGEMAKER_BASE_DIR": str(tmp_path)}) == tmp_path / "output" / "failure"


def test_pointer(tmp_path: Path) -> None:
    folder, outside = tmp_path / "checkpoints", tmp_path / "elsewhere.ckpt"
    (folder / "run").mkdir(parents=True)
    assert pointed_at(folder) is None
    for path in (folder / "run" / "a.ckpt", outside):
        path.touch()
    for other in (outside, "s3://bucket/a.ckpt"):
        point_at(folder, other)
        assert not (folder / "newest").exists()
    point_at(folder, folder / "run" / "a.ckpt")
    assert (folder / "newest").read_text() == "run/a.ckpt\n"
    assert pointed_at(folder) == str(folder / "run" / "a.ckpt")
    assert sorted(os.listdir(folder)) == ["newest", "run"]
    for text in ("run/gone.ckpt", "../elsewhere.ckpt", str(outside), "", "\0"):
        (folder / "newest").write_text(text)
        assert pointed_at(folder) is None


# ---- with one: every case is a start of a script that knows nothing of SageMaker ----


class Monitored(Learner):
    """Its first epoch is its best."""

    def on_train_epoch_end(self) -> None:
        self.log("score", float(self.current_epoch), sync_dist=True)


class Failing(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and batch_idx == 2:
            raise ValueError("the cause")
        return super().training_step(batch, batch_idx)


class Start:
    """One start of the script in its job, and what can be seen afterwards."""

    def __init__(self, base: Path, strategy: Any = None, model: Any = None, number: int = 1, **options: Any) -> None:
        os.environ["SAGEMAKER_BASE_DIR"] = str(base)
        self.base, self.model = base, model or Learner()
        sagemaker_job._trainers = count(number)
        code = base / "code"
        code.mkdir(parents=True, exist_ok=True)
        strategy = strategy or SMDDPStrategy(**grouped(verbose=False, algorithm="native"))
        with chdir(code):
            trainer = make_trainer(strategy, **{"enable_checkpointing": True, "max_epochs": 1, **options})
            trainer.fit(self.model)
        self.trainer = trainer
        torch.distributed.barrier()
        self.steps, self.trained = trainer.global_step, len(getattr(self.model, "losses", ()))
        self.root = os.path.relpath(trainer.default_root_dir, base)
        torch.distributed.barrier()

    def listing(self) -> list[str]:
        return sorted(str(path.relative_to(self.base)) for path in self.base.rglob("*.ckpt"))

    @property
    def step_of_model(self) -> int:
        path = self.base / "model" / "model.ckpt"
        return int(torch.load(path, weights_only=True)["global_step"]) if path.is_file() else -1

    def seen(self) -> dict[str, Any]:
        newest = self.base / "checkpoints" / "newest"
        seen = {
            "steps": self.steps, "trained": self.trained, "root": self.root, "files": self.listing(),
            "newest": newest.read_text().strip() if newest.exists() else None, "model": self.step_of_model,
        }  # fmt: skip
        torch.distributed.barrier()
        return seen


def clear(folder: Path) -> None:
    if os.environ["RANK"] == "0":
        shutil.rmtree(folder)
    torch.distributed.barrier()


def defaults(base: Path) -> list[dict[str, Any]]:
    """Nothing is given but a logger that counts versions; the second start goes on, the third has nothing to do."""
    logger: dict[str, Any] = {"logger": CSVLogger(str(base / "logs"), "run"), "log_every_n_steps": 1}
    found = [Start(base, **logger).seen(), Start(base, max_epochs=2, **logger).seen()]
    clear(base / "model")  # a new container
    return [*found, Start(base, max_epochs=2, **logger).seen(), Start(base, number=2, logger=False).seen()]


def several_fits(base: Path) -> list[dict[str, Any]]:
    """A validation, and a fit after a fit, which has weights to begin with."""
    Start(base)
    again, model = Start(base, max_epochs=2), Learner()
    went_on_from = str(again.trainer.ckpt_path)
    again.trainer.fit_loop.max_epochs = 3
    again.trainer.fit(model)
    return [{"first": went_on_from, "second": again.trainer.ckpt_path, "trained": len(model.losses)}]


def given_directories(base: Path) -> list[dict[str, Any]]:
    """Nothing moves."""
    kept: dict[str, Any] = {"callbacks": [ModelCheckpoint(str(base / "mine"))], "default_root_dir": str(base / "root")}
    root: dict[str, Any] = {"logger": False, "default_root_dir": str(base / "checkpoints")}
    return [Start(base, **kept).seen(), Start(base, **root).seen()]


def weights_alone(base: Path) -> list[dict[str, Any]]:
    """Which nobody can go on from."""

    def start(epochs: int) -> dict[str, Any]:
        full = ModelCheckpoint(filename="full")
        weights = ModelCheckpoint(filename="w", save_weights_only=True, every_n_train_steps=2)
        return Start(base, max_epochs=epochs, callbacks=[full, weights]).seen()

    return [start(1), start(2)]


def best_or_last(base: Path) -> list[dict[str, Any]]:
    best: dict[str, Any] = {"model": Monitored(), "callbacks": [ModelCheckpoint(monitor="score")], "max_epochs": 2}
    every: dict[str, Any] = {"every_n_train_steps": 2, "save_on_train_epoch_end": False}
    background = SMDDPStrategy(**grouped(verbose=False, algorithm="native", async_save=True))
    directories = SMDDPStrategy(**grouped(verbose=False, algorithm="native", sharded=True))
    return [
        Start(base / "best", **best).seen(),
        Start(base / "sparse", callbacks=[ModelCheckpoint(**every)]).seen(),
        Start(base / "background", background, callbacks=[ModelCheckpoint(**every)]).seen(),
        Start(base / "sharded", directories).seen(),
        Start(base / "none", enable_checkpointing=False).seen(),
    ]


def pipeline(base: Path) -> list[dict[str, Any]]:
    return [
        Start(base, PipelineStrategy(**grouped(verbose=False)), Net(), max_epochs=epochs).seen() for epochs in (1, 2)
    ]


def all_cases(base: str) -> dict[str, list[dict[str, Any]]]:
    """In one process of a rank, as starting it takes longer than they do."""
    cases = (defaults, several_fits, given_directories, weights_alone, best_or_last, pipeline)
    return {case.__name__: case(Path(base) / case.__name__) for case in cases}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    base = tmp_path_factory.mktemp("jobs")
    first, second = run_trainer_ranks(all_cases, 2, str(base), env=job(base))
    assert first == second  # the ranks saw the same
    return dict(first)


@pytest.mark.slow
def test_a_second_start_finds_the_first_ones_checkpoints(starts: dict[str, Any]) -> None:
    first, second, third, found = starts["defaults"]
    assert (first["root"], first["steps"], first["trained"]) == ("checkpoints", STEPS, STEPS)
    assert first["files"] == ["checkpoints/epoch=0-step=3.ckpt", "model/model.ckpt"]
    assert (first["newest"], first["model"]) == ("epoch=0-step=3.ckpt", STEPS)
    assert (second["steps"], second["trained"]) == (2 * STEPS, STEPS)
    assert (second["newest"], second["model"]) == ("epoch=1-step=6.ckpt", 2 * STEPS)
    assert (third["trained"], third["model"]) == (0, 2 * STEPS)
    # A second Trainer of the script starts anew.
    assert found["trained"] == STEPS
    assert {"checkpoints/trainer2/epoch=0-step=3.ckpt", "model/trainer2/model.ckpt"} < set(found["files"])
    assert found["root"] == "code"  # without a logger, LightningCLI's config.yaml would go there


@pytest.mark.slow
def test_only_the_first_fit_goes_on_by_itself(starts: dict[str, Any]) -> None:
    [found] = starts["several_fits"]
    assert found["first"].endswith("epoch=0-step=3.ckpt")
    assert (found["second"], found["trained"]) == (None, STEPS)


@pytest.mark.slow
def test_nothing_moves_that_was_given(starts: dict[str, Any]) -> None:
    both, root = starts["given_directories"]
    assert both["files"] == ["mine/epoch=0-step=3.ckpt", "model/model.ckpt"]
    assert (both["root"], both["newest"], both["model"]) == ("root", None, STEPS)
    assert "checkpoints/checkpoints/epoch=0-step=3.ckpt" in root["files"]
    assert root["trained"] == STEPS


@pytest.mark.slow
def test_weights_alone_are_kept_apart(starts: dict[str, Any]) -> None:
    first, second = starts["weights_alone"]
    assert {"checkpoints/full.ckpt", "checkpoints/weights/w.ckpt"} < set(first["files"])
    assert first["newest"] == "full.ckpt"
    assert (second["steps"], second["trained"]) == (2 * STEPS, STEPS)


@pytest.mark.slow
def test_final_model(starts: dict[str, Any]) -> None:
    best, sparse, background, sharded, none = starts["best_or_last"]
    assert (best["steps"], best["model"]) == (2 * STEPS, STEPS)
    for found in (sparse, background):
        assert (found["newest"], found["model"]) == ("epoch=0-step=2.ckpt", STEPS)  # no checkpoint has the last step
    assert sharded["model"] == STEPS
    assert none["files"] == []


@pytest.mark.slow
def test_pipelines_do_the_same(starts: dict[str, Any]) -> None:
    first, second = starts["pipeline"]
    steps = first["steps"]
    assert (first["newest"], first["model"]) == (f"epoch=0-step={steps}.ckpt", steps)
    assert (second["newest"], second["model"]) == (f"epoch=1-step={2 * steps}.ckpt", 2 * steps)
    assert f"checkpoints/epoch=0-step={steps}.ckpt" in second["files"]  # the one that it went on from stays


# ---- failures ----


def failing(base: str) -> str:
    """In training; this rank's error."""
    try:
        Start(Path(base), model=Failing())
    except (ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("it did not fail")


@pytest.mark.slow
def test_failure_names_the_first_cause(tmp_path: Path) -> None:
    first, second = run_trainer_ranks(failing, 2, str(tmp_path), env=job(tmp_path))
    text = (tmp_path / "output" / "failure").read_text()
    assert text.startswith("Rank 1 (host ")
    assert text.endswith("failed at step 2 (forward): ValueError: the cause")
    assert (first, second) == (text, "the cause")
    assert not (tmp_path / "model").exists()


def test_failure_before_there_is_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in job(tmp_path, hosts=2).items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(SMDDPStrategy(**grouped(verbose=False)))
    with pytest.raises(ValueError, match="has 2 nodes") as caught:
        trainer.fit(Learner())
    assert (tmp_path / "output" / "failure").read_text() == f"ValueError: {caught.value}"[:1024]


# ---- stops ----


class Reclaimed(Callback):
    """The spot instance is taken back, once; the steps from there on are long, as ranks agree on one to stop at."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)
        if trainer.global_step >= 3:
            time.sleep(1.0)


def stopped(base: str) -> None:
    with pytest.raises(SystemExit) as caught:
        Start(Path(base), model=Learner(count=48), callbacks=[Reclaimed()])
    assert caught.value.code == 143


def started_again(base: str) -> dict[str, Any]:
    return Start(Path(base), model=Learner(count=48)).seen()


@pytest.mark.slow
def test_a_stopped_job_goes_on(tmp_path: Path) -> None:
    run_trainer_ranks(stopped, 2, str(tmp_path), env=job(tmp_path))
    assert (tmp_path / "checkpoints" / "newest").read_text().strip() == "smddp-stop.ckpt"
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "output").exists()  # a stop is no failure
    for seen in run_trainer_ranks(started_again, 2, str(tmp_path), env=job(tmp_path)):
        assert seen["steps"] == seen["model"] == 2 * STEPS
        assert 0 < seen["trained"] < 2 * STEPS


# ---- several hosts ----


@pytest.mark.slow
def test_sharded_checkpoints_need_a_folder_that_all_hosts_see(tmp_path: Path) -> None:
    texts = run_trainer_ranks(sharded_on_two_hosts, 2, env=job(tmp_path, hosts=2), node_ids=["algo-1", "algo-2"])
    for text in texts:
        assert "sharded=True needs a directory that all 2 hosts see" in text


def sharded_on_two_hosts() -> str:
    trainer = make_trainer(SMDDPStrategy(**grouped(verbose=False, sharded=True)), enable_checkpointing=True)
    with pytest.raises((ValueError, RankFailedError)) as caught:
        trainer.fit(Learner())
    return str(caught.value)
