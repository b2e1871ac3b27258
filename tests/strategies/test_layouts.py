"""Any layout to any layout: a run goes on from a checkpoint of any other, in one file or in a directory."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from lightning_smddp import PipelineStrategy, SMDDPStrategy
from lightning_smddp.checkpoint import sharded
from lightning_smddp.checkpoint.sharded import is_sharded
from lightning_smddp.cli import main
from lightning_smddp.communication.objects import RankFailedError
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.layouts import BETWEEN, LAYOUTS, STEPS, WITHIN, Model, Result, Run, cloned, execute
from tests.strategies.learners import IN_ANOTHER_LAYOUT, RESUMING, make_trainer

pytestmark = [*RESUMING, IN_ANOTHER_LAYOUT]


def check(run: Run, result: Result, unbroken: Result) -> None:
    """It started with what the checkpoint has, and went on as if nothing had happened."""
    saved = check_start(run, result)
    rest = unbroken.losses[-len(result.losses) :]
    assert len(rest) == STEPS - saved["global_step"]
    torch.testing.assert_close(result.losses, rest, rtol=1e-6, atol=1e-9, msg=run.name)


def check_start(run: Run, result: Result) -> Any:
    """It started with what the checkpoint has; returns that."""
    path = run.ckpt_path
    assert path is not None
    saved = sharded.load(path) if is_sharded(path) else torch.load(path, weights_only=True)
    assert list(saved["state_dict"]) == list(Model(run.kind).state_dict())
    expected = saved["state_dict"], saved["optimizer_states"][0]
    for found, value in zip((result.state_dict, result.optimizer), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=0, msg=lambda text: f"{run.name}: {text}")
    return saved


def go_through(sources: Iterable[Run], targets: dict[str, Sequence[str]], unbroken: Result) -> None:
    """Save by each of ``sources``, and go on in those layouts of ``targets`` that it names.

    Layouts with equally many ranks share their processes.
    """
    sources = list(sources)
    for ranks in (1, 2, 3, 4):
        runs = [run for run in sources if LAYOUTS[run.layout][0] == ranks]
        for run, result in zip(runs, execute(runs) if runs else [], strict=True):
            torch.testing.assert_close(result.losses, unbroken.losses, rtol=1e-6, atol=1e-9, msg=run.name)
            assert is_sharded(run.path(WITHIN)) == run.sharded
    for ranks in (1, 2, 3, 4):
        runs = [
            Run(run.kind, layout, run.directory, run.sharded, start(run, layout))
            for run in sources
            for layout in targets[run.layout]
            if LAYOUTS[layout][0] == ranks
        ]
        for run, result in zip(runs, execute(runs) if runs else [], strict=True):
            check(run, result, unbroken)


def start(run: Run, layout: str) -> Path:
    """Where another run goes on: between epochs, as its samples would begin anew. Lightning alone needs one file."""
    path = run.path(BETWEEN)
    if layout != "alone" or not is_sharded(path):
        return path
    assert main(["consolidate", str(path), str(path.with_name(f"file-{path.name}"))]) == 0
    return path.with_name(f"file-{path.name}")


def alone(kind: str, directory: Path) -> tuple[Run, Result]:
    """An unbroken run in one process."""
    run = Run(kind, "alone", directory)
    [result] = execute([run])
    assert len(result.losses) == STEPS
    return run, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sharded", "targets"),
    [
        ("gpt", True, {"pp2": ["alone", "dp2"], "dp2": ["pp2"]}),  # a tied weight that two stages hold
        ("net", False, {"fsdp2": ["pp2"], "pp2": ["fsdp2"]}),  # directories of full sharding: tests/sharding
    ],
)
def test_from_one_layout_to_others(kind: str, sharded: bool, targets: dict[str, list[str]], tmp_path: Path) -> None:
    _, unbroken = alone(kind, tmp_path)
    go_through([Run(kind, layout, tmp_path, sharded) for layout in targets], targets, unbroken)


@pytest.mark.slow
def test_from_one_process_to_two_stages(tmp_path: Path) -> None:
    """That save files, or directories."""
    first, unbroken = alone("net", tmp_path)
    runs = [Run("net", "pp2", tmp_path, sharded, first.path(BETWEEN)) for sharded in (False, True)]
    for run, result in zip(runs, execute(runs), strict=True):
        check(run, result, unbroken)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
@pytest.mark.parametrize("kind", ["net", "gpt"])
def test_every_layout(kind: str, sharded: bool, tmp_path: Path) -> None:
    """From two stages to each, and from each to two stages; two replicas of two stages to smddp."""
    _, unbroken = alone(kind, tmp_path)
    others = ["alone", "pp3", "pp4", "dp2", "2x2"]
    sources = [Run(kind, layout, tmp_path, sharded and layout != "alone") for layout in ["pp2", *others]]
    targets = {layout: ["pp2"] for layout in others}
    go_through(sources, {**targets, "pp2": others, "2x2": ["pp2", "dp2", "alone"], "dp2": ["pp2", "2x2"]}, unbroken)


# ---- Lightning's features, with directories ----


def pipeline() -> PipelineStrategy:
    return PipelineStrategy(**grouped(verbose=False, sharded=True))


def callbacks_case(directory: str) -> Any:
    """``save_top_k``, ``save_last`` both ways, resuming by name, weights alone, and saving after the run."""
    found: dict[str, Any] = {}
    for last in (True, "link"):
        where = f"{directory}/{last}"
        saving = ModelCheckpoint(where, "{step}", every_n_train_steps=1, save_last=last, save_top_k=1)
        trainer = make_trainer(pipeline(), max_steps=3, callbacks=[saving], enable_checkpointing=True)
        trainer.fit(Model("net"))
        trainer.strategy.barrier()
        found[f"{last}"] = sorted(os.listdir(where)), saving.best_model_path
        again = make_trainer(pipeline(), max_steps=4, callbacks=[saving], enable_checkpointing=True)
        again.fit(Model("net"), ckpt_path="last")
        found[f"{last} again"] = sorted(os.listdir(where)), again.global_step
    path = f"{directory}/afterwards.ckpt"
    for _ in range(2):  # the second time it is replaced
        again.save_checkpoint(path)
    again.save_checkpoint(f"{directory}/weights.ckpt", weights_only=True)
    weights = {name: value.detach().clone() for name, value in again.model.state_dict().items()}
    model = Model("net")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    once_more = make_trainer(pipeline(), max_steps=5)
    once_more.fit(model, ckpt_path=path)
    return found, weights, sorted(os.listdir(directory)), once_more.global_step


def failing(directory: str) -> Any:
    """A directory that cannot be written to, and one that was damaged."""
    Path(directory, "file").touch()
    warnings.filterwarnings("ignore", "a filter of the user's, before all others")
    trainer, filters = make_trainer(pipeline(), max_steps=1), warnings.filters[:]
    trainer.fit(Model("net"))
    assert warnings.filters == filters, "Lightning's advice on `sync_dist` is silent in a pipeline's run alone"
    torch.save(Model("net").state_dict(), f"{directory}.pt")
    found = []
    for act in (
        lambda: trainer.save_checkpoint(f"{directory}/file/a.ckpt"),
        lambda: trainer.save_checkpoint(f"{directory}/a.ckpt", storage_options={}),
        lambda: make_trainer(pipeline()).fit(Model("net"), ckpt_path=f"{directory}/empty.ckpt"),
        lambda: make_trainer(pipeline()).fit(Model("net"), ckpt_path=f"{directory}.pt"),
    ):
        try:
            act()
        except Exception as error:
            found.append([isinstance(error, OSError), str(error)])
    return found


class Directories(CheckpointIO):
    """A user's own, whose checkpoints are directories too."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        os.makedirs(path)
        torch.save(checkpoint, os.path.join(path, "mine.pt"))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        return torch.load(os.path.join(path, "mine.pt"), weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path)


def of_the_users_own(directory: str) -> list[int]:
    """Steps at the end of runs that go on from a directory of theirs, and from one of ours."""

    def fit(steps: int, path: str | None = None) -> Any:
        strategy = SMDDPStrategy(**grouped(verbose=False, algorithm="native", checkpoint_io=Directories()))
        trainer = make_trainer(strategy, max_steps=steps)
        trainer.fit(Model("net"), ckpt_path=path)
        return trainer

    first = fit(1)
    first.save_checkpoint(f"{directory}/own.ckpt")
    found = [fit(2, f"{directory}/own.ckpt").global_step, fit(5, f"{directory}/callbacks/afterwards.ckpt").global_step]
    first.strategy.remove_checkpoint(f"{directory}/own.ckpt")
    return found


class SavesBetween(Callback):
    """Saves behind the first step; the second one ends before anything is written."""

    def __init__(self, path: str, gate: threading.Event) -> None:
        self.path, self.gate = path, gate
        self.weights: dict[str, Tensor] = {}
        self.were_there: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            self.weights = cloned(trainer.strategy.lightning_module_state_dict())
            trainer.save_checkpoint(self.path)
            trainer.strategy.remove_checkpoint(f"{self.path}.replaced")
        elif trainer.global_step == 2:
            self.were_there = [os.path.exists(self.path), os.path.exists(f"{self.path}.replaced")]
            self.gate.set()


def in_background(directory: str) -> Any:
    """Training goes on while all ranks write; what one cannot write ends all, at the next batch or the fit's end."""
    gate, write = threading.Event(), dcp.FileSystemWriter.write_data

    def fit(name: str, write_data: Any, steps: int) -> SavesBetween:
        gate.clear()
        dcp.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
        saving = SavesBetween(f"{directory}/{name}.ckpt", gate)
        os.makedirs(f"{saving.path}.replaced", exist_ok=True)
        options = grouped(verbose=False, sharded=True, async_save=True, checkpoint_io=Directories())
        trainer = make_trainer(PipelineStrategy(**options), max_steps=steps, max_epochs=-1, callbacks=[saving])
        trainer.fit(Model("net"))
        return saving

    def later(*args: Any) -> Any:
        assert gate.wait(60)
        return write(*args)

    def never(*args: Any) -> Any:
        if os.environ["RANK"] == "1":  # `dist.get_rank()` is a replica's number while the other thread is in a step
            raise OSError(errno.ENOSPC, "No space left on device")
        return later(*args)

    try:
        saved = fit("saved", later, steps=4)
        failures = []
        for steps in (2, 1000):  # it is known behind the second step
            try:
                fit("lost", never, steps)
            except (OSError, RankFailedError) as error:
                failures.append(str(error))
        return saved.weights, saved.were_there, failures, sorted(os.listdir(directory))
    finally:
        dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]


def all_cases(directory: str) -> list[Any]:
    """In one process of a rank, as starting it takes longer than they do."""
    os.makedirs(f"{directory}/errors/empty.ckpt", exist_ok=True)
    found = [callbacks_case(f"{directory}/callbacks"), failing(f"{directory}/errors"), of_the_users_own(directory)]
    return [*found, in_background(f"{directory}/background")]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    directory = tmp_path_factory.mktemp("cases")
    with warnings.catch_warnings():
        for mark in pytestmark:
            warnings.filterwarnings("ignore", mark.args[0].split(":")[1])
        return directory, run_trainer_ranks(all_cases, 2, str(directory))


@pytest.mark.slow
def test_checkpoint_callbacks(cases: Any) -> None:
    directory = cases[0] / "callbacks"
    results = [callbacks for callbacks, *_ in cases[1]]
    for found, _, names, steps in results:
        assert found["True"][0] == ["last.ckpt", "step=3.ckpt"]
        assert found["link"][0] == ["last.ckpt", "step=3.ckpt"]
        assert found["True"][1].endswith("step=3.ckpt")
        assert found["True again"] == (["last.ckpt", "step=4.ckpt"], 4)
        assert found["link again"] == (["last.ckpt", "step=4.ckpt"], 4)
        assert names == ["True", "afterwards.ckpt", "link", "weights.ckpt"]
        assert steps == 5
    assert (directory / "link" / "last.ckpt").is_symlink()
    saved = sharded.load(directory / "afterwards.ckpt")
    weights = results[0][1]
    assert {name.removeprefix("module.") for name in weights} >= set(saved["state_dict"])
    for name, value in saved["state_dict"].items():
        assert torch.equal(value, weights.get(name, weights.get(f"module.{name}")))
    assert "optimizer_states" not in sharded.load(directory / "weights.ckpt")
    assert saved["hyper_parameters"] == {"kind": "net"}


@pytest.mark.slow
def test_errors_are_raised_on_every_rank(cases: Any) -> None:
    directory, results = cases
    for _, found, *_ in results:
        assert [is_system_error for is_system_error, _ in found] == [True, False, False, False]
        assert "could not save a checkpoint" in found[0][1]
        assert "storage_options={}" in found[1][1]
        assert "not a complete sharded checkpoint" in found[2][1]
        assert "errors.pt: was not saved by a Trainer. Load it by" in found[3][1]
    assert sorted(os.listdir(directory / "errors")) == ["empty.ckpt", "file"]


@pytest.mark.slow
def test_directories_of_another_checkpoint_io(cases: Any) -> None:
    """Are left to it; those of ours are ours."""
    directory, results = cases
    assert [found for _, _, found, _ in results] == [[2, 5]] * 2
    assert not (directory / "own.ckpt").exists()


@pytest.mark.slow
def test_in_the_background(cases: Any) -> None:
    directory, results = cases
    stored = sharded.load(directory / "background" / "saved.ckpt")["state_dict"]
    for *_, (weights, were_there, failures, names) in results:
        assert were_there == [False, True]
        assert weights
        for name, value in weights.items():
            assert torch.equal(stored[name], value), name
        assert ["No space left" in failure for failure in failures] == [True, True]
        assert names == ["lost.ckpt.replaced", "saved.ckpt"]
