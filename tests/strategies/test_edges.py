"""What surrounds training, as users do it with ``ddp``: pickling, profilers, exceptions, odd modules."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smddp import PipelineStrategy, SMDDPFSDPStrategy
from tests.ranks import run_each, run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer, silent
from tests.strategies.pipeline_learners import Cases, Evaluated, call

pytestmark = [
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's, of copying its own structures
]
BOTH = ["smddp", "pipeline"]
STEPS = 3  # in an epoch


def trainer_for(name: str, **options: Any) -> Any:
    strategies: dict[str, Callable[[], Any]] = {
        "ddp": lambda: "ddp",
        "smddp": lambda: silent(algorithm="native"),
        "pipeline": lambda: PipelineStrategy(**grouped(verbose=False, check=False)),
        "fsdp": lambda: SMDDPFSDPStrategy(**grouped(verbose=False)),
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


def copies(name: str) -> list[bool]:
    module = Evaluated()
    trainer_for(name).fit(module)
    equal = []
    for again in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        expected, other = weights_of(module), weights_of(again(module))
        equal.append(all(torch.equal(other[key], expected[key]) for key in expected))
    return equal


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOTH, "fsdp"])
def test_a_module_can_be_pickled_and_copied_after_fit(name: str) -> None:
    assert SLOW.results((copies, name)) == [[True, True]] * 2


def test_a_strategy_that_has_not_run_is_copied_with_all_that_is_about_it() -> None:
    strategy = PipelineStrategy(start_method="spawn")
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other._hook_view.strategy is other


# ---- exceptions ----


class Failing(Evaluated):
    fails = True

    def on_train_batch_end(self, *args: Any) -> None:
        if self.fails and self.trainer.global_step == 2:
            raise KeyError("the user's own")


def goes_on(name: str) -> Any:
    module = Failing()
    assert "the user's own" in error_of(lambda: trainer_for(name, profiler="advanced").fit(module))
    module.fails = False
    trainer = trainer_for(name)
    trainer.fit(module)
    return weights_of(module), trainer.global_step


@pytest.mark.slow
def test_a_module_is_used_again_after_an_exception_that_the_user_caught() -> None:
    for expected, actual in zip(SLOW.results((goes_on, "ddp")), SLOW.results((goes_on, "smddp")), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def goes_on_in_parts() -> str:
    module = Failing()
    assert "the user's own" in error_of(lambda: trainer_for("pipeline").fit(module))
    return error_of(lambda: trainer_for("pipeline").fit(module))


def test_a_module_in_parts_says_so() -> None:
    for error in run_trainer_ranks(goes_on_in_parts, 2):
        assert "ValueError: Failing is in parts: an exception ended the run" in error
        assert "ckpt_path" in error


# ---- modules, callbacks ----


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


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_lazy_layers_are_refused_with_the_cure_and_barriers_in_a_step_do_not_hang(name: str) -> None:
    for lazy, waiting in SLOW.results((refuses, name)):
        assert lazy.startswith("ValueError: 'net.0.weight' of Lazy is of a lazy layer and has no shape yet.")
        assert "configure_model" in lazy
        if name == "smddp":
            assert waiting == "nothing"
        else:
            assert "`strategy.barrier()` is called inside of a step that runs as a pipeline" in waiting


# ---- what Lightning advises ----


SLOW = Cases(
    call,
    [
        *((body, name) for body in (copies, refuses) for name in BOTH),
        (copies, "fsdp"),
        *((goes_on, name) for name in ("ddp", "smddp")),
    ],
)


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
    trainer.save_checkpoint(path)
    refused = error_of(lambda: trainer_for(name).fit(Keeping(), ckpt_path=path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Keeping()
        trainer_for(name).fit(module, ckpt_path=path, weights_only=False)
    return refused, module.got


@pytest.mark.slow
def test_resuming_refuses_what_is_not_plain_data_and_weights_only_false_loads_it(tmp_path: Path) -> None:
    first, second = run_trainer_ranks(run_each, 2, keeps, [(name, str(tmp_path / f"{name}.ckpt")) for name in BOTH])
    assert first == second
    for refused, got in first:
        assert f"of which nothing was run: Unsupported global: GLOBAL {Thing.__module__}.Thing" in refused
        assert "weights_only" not in refused
        assert got == "Thing"
