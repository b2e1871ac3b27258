"""What surrounds training, as users do it with ``ddp``: pickling, profilers, exceptions, odd modules."""

from __future__ import annotations

import copy
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from lightning_smddp import PipelineStrategy
from tests.programs import run_program
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer, silent
from tests.strategies.pipeline_learners import Evaluated, run_each

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
BOTH = ["smddp", "pipeline"]
STEPS = 3  # in an epoch
ONE_QUICK = ["smddp", pytest.param("pipeline", marks=pytest.mark.slow)]


def trainer_for(name: str, **options: Any) -> Any:
    strategies: dict[str, Callable[[], Any]] = {
        "ddp": lambda: "ddp",
        "smddp": lambda: silent(algorithm="native"),
        "pipeline": lambda: PipelineStrategy(**grouped(verbose=False, check=False)),
    }
    limits = {"limit_train_batches": STEPS, "limit_val_batches": 1}
    return make_trainer(strategies[name](), **{**limits, **options})


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---- after a fit ----


def copies(name: str) -> tuple[list[bool], list[int], list[str]]:
    trainer, module = trainer_for(name), Evaluated()
    trainer.fit(module)
    equal, steps = [], []
    for again in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        expected, other = weights_of(module), weights_of(again(module))
        equal.append(all(torch.equal(other[key], expected[key]) for key in expected))
        second = again(trainer)
        steps.append(second.global_step)
        second.fit_loop.max_epochs = 3
        second.fit(module)
        steps.append(second.global_step)
    return equal, steps, supervisors()


def supervisors() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "supervisor" in thread.name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of copying its own structures
@pytest.mark.parametrize("name", BOTH)
def test_module_and_trainer_can_be_pickled_and_copied_after_fit(name: str) -> None:
    for result in run_trainer_ranks(copies, 2, name):
        assert result == ([True, True], [2 * STEPS, 3 * STEPS] * 2, [])


def test_a_strategy_that_has_not_run_is_copied_with_all_that_is_about_it() -> None:
    strategy = PipelineStrategy(start_method="spawn")
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other._hook_view.strategy is other
        assert {outside.view.strategy for outside in other._hook_view._outside.values()} == {other}


def by_hand(name: str) -> list[list[str]]:
    seen = []
    trainer = trainer_for(name)
    trainer.strategy.setup_environment()
    seen.append(supervisors())
    trainer.strategy.teardown()
    seen.append(supervisors())
    trainer.fit(Evaluated())
    trainer.strategy.teardown()
    seen.append(supervisors())
    other = trainer_for(name)
    other.strategy.connect(Evaluated())
    other.strategy.setup_environment()
    seen.append(supervisors())
    other.strategy.teardown()
    seen.append(supervisors())
    return seen


@pytest.mark.parametrize("name", ONE_QUICK)
def test_no_supervisor_is_left_by_a_strategy_that_is_torn_down_by_hand(name: str) -> None:
    for seen in run_trainer_ranks(by_hand, 2, name):
        assert [len(names) for names in seen] == [1, 0, 0, 1, 0]


# ---- exceptions ----


class Failing(Evaluated):
    fails = True

    def on_train_batch_end(self, *args: Any) -> None:
        if self.fails and self.trainer.global_step == 2:
            raise KeyError("the user's own")


def goes_on(name: str) -> Any:
    module = Failing()
    assert "the user's own" in error_of(lambda: trainer_for(name).fit(module))
    module.fails = False
    trainer = trainer_for(name)
    trainer.fit(module)
    return weights_of(module), trainer.global_step


@pytest.mark.slow
def test_a_module_is_used_again_after_an_exception_that_the_user_caught() -> None:
    for expected, actual in run_trainer_ranks(run_each, 2, goes_on, [("ddp",), ("smddp",)]):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def goes_on_in_parts() -> str:
    module = Failing()
    assert "the user's own" in error_of(lambda: trainer_for("pipeline").fit(module))
    return error_of(lambda: trainer_for("pipeline").fit(module))


def test_a_module_in_parts_says_so() -> None:
    for error in run_trainer_ranks(goes_on_in_parts, 2):
        assert "ValueError: Failing is in parts: an exception ended the run" in error
        assert "ckpt_path" in error


def profiled(name: str, directory: str, many: int) -> list[Any]:
    from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

    found: list[Any] = []
    for profiler in (SimpleProfiler, AdvancedProfiler, PyTorchProfiler)[:many]:
        for fails in (False, True):
            module = Failing()
            module.fails = fails
            trainer = trainer_for(name, max_epochs=1, profiler=profiler(directory, f"{name}-{profiler.__name__}"))
            found.append((error_of(lambda: trainer.fit(module)), trainer.global_step))  # noqa: B023
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "many"), [("smddp", 3), ("pipeline", 1)])
def test_profilers_work_with_an_exception_too(name: str, many: int, tmp_path: Path) -> None:
    expected = [("nothing", STEPS), ('KeyError: "the user\'s own"', 2)] * many
    for result in run_trainer_ranks(profiled, 2, name, str(tmp_path), many):
        assert result == expected


UPLOADING = """
import time
from pathlib import Path
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

class Uploads(Callback):
    def on_exception(self, trainer, module, error):
        if trainer.global_rank == 1:
            time.sleep(5)
        Path(f"uploaded-{trainer.global_rank}").touch()

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 2))  # one for each stage

    def on_train_batch_end(self, *args):
        if self.trainer.global_step == 2 and self.global_rank == 1:
            raise KeyError("the user's own")

if __name__ == "__main__":
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="smddp", max_epochs=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, callbacks=[Uploads()])
    trainer.fit(Model())
"""


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
def test_a_long_hook_for_exceptions_comes_to_its_end(tmp_path: Path) -> None:
    """It takes longer than other ranks wait without it."""
    (tmp_path / "train.py").write_text(UPLOADING)
    begun = time.monotonic()
    result = run_program([*TORCHRUN, "train.py"], tmp_path, {"XDG_CACHE_HOME": str(tmp_path)})
    assert result.returncode != 0
    assert "the user's own" in result.stderr
    assert (tmp_path / "uploaded-1").exists(), result.stderr
    assert time.monotonic() - begun < 60


# ---- modules, callbacks ----


class WithoutValidation(Evaluated):
    validation_step = None  # type: ignore[assignment]


def without_validation(name: str) -> list[list[str]]:
    instance = Evaluated()
    instance.validation_step = None  # type: ignore[assignment, method-assign]
    logged = []
    for module in (instance, WithoutValidation()):
        trainer = trainer_for(name)
        trainer.fit(module)
        logged.append(sorted(trainer.callback_metrics))
    return logged


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")
@pytest.mark.parametrize("name", ONE_QUICK)
def test_a_validation_step_that_is_none_means_no_validation(name: str) -> None:
    assert run_trainer_ranks(without_validation, 2, name) == [[["loss", "loss_epoch", "loss_step"]] * 2] * 2


def averaged(name: str) -> dict[str, Tensor]:
    module = Evaluated()
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
    trainer_for(name, callbacks=[averaging], max_epochs=4).fit(module)
    return weights_of(module)


@pytest.mark.filterwarnings("ignore")
def test_stochastic_weight_averaging_is_that_of_ddp() -> None:
    for expected, actual in run_trainer_ranks(run_each, 2, averaged, [("ddp",), ("smddp",)]):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Lazy(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.LazyLinear(16)


class Waiting(Evaluated):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.trainer.strategy.barrier()
        return super().training_step(batch, batch_idx)


def refuses(name: str) -> tuple[str, str]:
    return error_of(lambda: trainer_for(name).fit(Lazy())), error_of(lambda: trainer_for(name).fit(Waiting()))


@pytest.mark.parametrize("name", ONE_QUICK)
def test_lazy_layers_are_refused_with_the_cure_and_barriers_in_a_step_do_not_hang(name: str) -> None:
    for lazy, waiting in run_trainer_ranks(refuses, 2, name):
        assert lazy.startswith("ValueError: 'net.0.weight' of Lazy has no shape yet: 'net.0' is a LazyLinear.")
        assert "configure_model" in lazy
        if name == "smddp":
            assert waiting == "nothing"
        else:
            assert "`strategy.barrier()` is called inside of a step that runs as a pipeline" in waiting


# ---- what Lightning advises ----


class Partly(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def advised() -> str:
    return error_of(lambda: trainer_for("smddp").fit(Partly()))


@pytest.mark.slow
def test_advice_on_unused_parameters_names_this_strategy() -> None:
    for error in run_trainer_ranks(advised, 2):
        assert "`strategy='smddp_find_unused_parameters_true'`" in error
        assert "`strategy=SMDDPStrategy(find_unused_parameters=True)`" in error


@pytest.mark.parametrize("name", ["smddp", "smddp_pipeline"])
def test_advice_in_a_notebook_names_this_strategy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch.trainer.connectors.accelerator_connector as connector

    monkeypatch.setattr(connector, "_IS_INTERACTIVE", True)
    with pytest.raises(ValueError, match=rf"Trainer\(strategy='{name}_notebook'\)"):
        Trainer(accelerator="cpu", devices=2, strategy=name)


SHORT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
for name in ("SMDDPStrategy", "PipelineStrategy"):
    arguments = {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": {"class_path": name}}}
    cli = LightningCLI(BoringModel, run=False, args=arguments)
    print(type(cli.trainer.strategy).__module__, type(cli.trainer.strategy).__name__)
"""


def test_short_class_names_work_in_a_cli_file(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SHORT)
    result = run_program(["short.py"], tmp_path, {})
    assert result.returncode == 0, result.stderr
    names = ["SMDDPStrategy", "PipelineStrategy"]
    assert result.stdout.split("\n")[-3:-1] == [f"lightning_smddp.strategies.lightning {name}" for name in names]


def test_the_version_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_smddp import __version__, cli

    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lightning-smddp {__version__}\n"


# ---- checkpoints ----


class Thing:
    """Not plain data."""


class Keeping(Evaluated):
    got = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["thing"] = Thing()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.got = type(checkpoint["thing"]).__name__


def keeps(name: str, path: str) -> Any:
    trainer = trainer_for(name, max_epochs=1)
    trainer.fit(Keeping())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.save_checkpoint(path)
    said = [str(warning.message) for warning in caught if "not plain data" in str(warning.message)]
    refused = error_of(lambda: trainer_for(name).fit(Keeping(), ckpt_path=path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Keeping()
        trainer_for(name).fit(module, ckpt_path=path, weights_only=False)
    return said, refused, module.got, weights_of(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_saving_says_what_resuming_will_refuse_and_weights_only_false_loads_it(name: str, tmp_path: Path) -> None:
    (said, refused, got, _), (nothing, *others) = run_trainer_ranks(keeps, 2, name, str(tmp_path / "a.ckpt"))
    assert len(said) == 1
    assert f"{Thing.__module__}.Thing, which is not plain data, and resuming will refuse it" in said[0]
    assert nothing == []
    assert f"contains `{Thing.__module__}.Thing`, which is not plain data; nothing of it was run" in refused
    assert "weights_only" not in refused
    assert [refused, got] == others[:2] == [refused, "Thing"]
