"""``SMDDPStrategy(shard="optimizer")``: the same numbers as without it, and a share of the optimizer's state each."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.nn import functional as F

from tests.ranks import RanksFailedError, run_trainer_ranks
from tests.strategies.learners import Learner, Outcome, assert_equal, make_trainer, outcome, silent
from tests.strategies.resuming import Scenario, resume_from_each
from tests.strategies.test_pipeline_features import scaled

BOTH = (None, "optimizer")


class Short(Learner):
    """Two or three steps an epoch."""

    def __init__(self) -> None:
        super().__init__(count=24)


class AdamLearner(Short):
    """AdamW on two groups, with a schedule."""

    def configure_optimizers(self) -> Any:
        first = {"params": self.net[0].parameters(), "lr": 0.05}
        optimizer = torch.optim.AdamW([first, {"params": self.net[2].parameters()}], lr=0.01, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class AdafactorLearner(Short):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


class WritingLearner(AdamLearner):
    """Changes its weights in hooks, in ways that must act once."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.99)
                p.data.clamp_(-0.5, 0.5)

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.net[0].bias.add_(0.01)

    def on_train_epoch_end(self) -> None:
        self.net[2].weight.data = self.net[2].weight.data * 1.5


class TwoOptimizers(Short):
    """Manual optimization of two optimizers that take turns, one of them with a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.net[0].parameters(), lr=0.01),
            torch.optim.RMSprop(self.net[2].parameters(), lr=0.01),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:

            def closure() -> Any:
                second.zero_grad()
                other = self.loss(batch)
                self.manual_backward(other)
                return other

            second.step(closure=closure)
        self.losses.append(loss.item())


class Overflowing(AdamLearner):
    """A gradient overflows in the third batch: a scaler leaves that step out."""

    def on_train_start(self) -> None:
        def overflow(gradient: Any) -> Any:
            return gradient * float("inf") if self.trainer.fit_loop.batch_idx == 2 else gradient

        self.net[0].weight.register_hook(overflow)


class BadBatch(AdamLearner):
    """One batch has a NaN."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        return loss * float("nan") if len(self.losses) == 2 else loss


class StepHooks(AdamLearner):
    """Hooks of the optimizer look at its groups before and behind each step, and see whole parameters."""

    def configure_optimizers(self) -> Any:
        (optimizer,), schedules = super().configure_optimizers()
        self.seen: list[int] = []

        def look(opt: Any, *_: Any) -> None:
            self.seen.append(sum(p.numel() for group in opt.param_groups for p in group["params"]))

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        return [optimizer], schedules

    def on_train_end(self) -> None:
        assert set(self.seen) == {sum(p.numel() for p in self.parameters())}


class Unfreezing(Callback):
    """The first layer trains from the second epoch on, in a group of its own.

    It is frozen behind the wrapping: DDP never averages what is frozen before it, as with ``BaseFinetuning``.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.net[0].parameters()), "lr": 0.02})


class LastLayer(Short):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[2].parameters(), lr=0.01)


class Validating(AdamLearner):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Convolution(Short):
    """A weight in channels-last order, a layer that is used twice, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: Any) -> Any:
        x = self.frozen(self.frozen(batch[0]))
        image = x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return F.cross_entropy(self.conv(image).flatten(1) * self.scale + self.net(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "groups and a schedule": (AdamLearner, {}),
    "whole parameters": (AdafactorLearner, {}),
    "clipping by norm": (AdamLearner, {"gradient_clip_val": 0.1}),
    "accumulation, clipping by value": (
        AdamLearner,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "hooks that write": (WritingLearner, {}),
    "a gradient scaler": (
        Overflowing,
        {"plugins": lambda: [scaled(init_scale=2.0**12, growth_interval=3)], "gradient_clip_val": 0.5},
    ),
    "two optimizers": (TwoOptimizers, {}),
    "a skipped step": (BadBatch, {}),
    "hooks of the optimizer": (StepHooks, {}),
    "unfreezing": (LastLayer, {"callbacks": Unfreezing}),
    "an average of weights": (Validating, {"callbacks": WeightAveraging}),
    "stochastic weight averaging": (
        Validating,
        {"callbacks": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1), "max_epochs": 3},
    ),
    "layouts of memory": (Convolution, {}),
}


def train(case: str, shard: str | None) -> Outcome:
    make, options = CASES[case]
    options = {"max_epochs": 2, **options}
    if "callbacks" in options:
        options["callbacks"] = [options["callbacks"]()]
    if "plugins" in options:
        options["plugins"] = options["plugins"]()
    model = make()
    mode = "skip" if case == "a skipped step" else "error"
    strategy = silent(shard=shard, on_nonfinite=mode, find_unused_parameters=case == "unfreezing")
    trainer = make_trainer(strategy, **options)
    trainer.fit(model)
    return outcome(model, trainer)


def train_both(cases: list[str]) -> dict[str, list[Outcome]]:
    return {case: [train(case, shard) for shard in BOTH] for case in cases}


COMPARED = [case for case in CASES if case != "a skipped step"]
EVERYDAY = ["groups and a schedule", "whole parameters", "clipping by norm"]
# Of parameters that three ranks cannot have equal parts of.
UNEVEN = ["whole parameters", "hooks that write", "unfreezing", "layouts of memory"]
OTHERS = [case for case in COMPARED if case not in [*EVERYDAY, *UNEVEN]]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, EVERYDAY, id="2-everyday"),
        pytest.param(2, OTHERS, marks=pytest.mark.slow, id="2-others"),
        pytest.param(3, UNEVEN, marks=pytest.mark.slow, id="3-uneven"),
    ],
)
def test_the_same_numbers_as_without_sharding(ranks, cases):
    for results in run_trainer_ranks(train_both, ranks, cases, timeout=110.0):
        for case, (expected, actual) in results.items():
            try:
                assert_equal(actual, expected, tolerance=1e-7)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None


def fit_some(shard: str | None, epochs: int, make: Any, path: str | None = None, **options: Any) -> tuple[Any, Any]:
    model = make()
    trainer = make_trainer(silent(shard=shard), max_epochs=epochs, **options)
    trainer.fit(model, ckpt_path=path)
    return model, trainer


def save_and_go_on(folder: str, make: Any) -> dict[str, Any]:
    """Two epochs at once; and one epoch, a file, and another epoch in the other layout."""
    found: dict[str, Any] = {}
    for first, second in ((None, "optimizer"), ("optimizer", None), ("optimizer", "optimizer")):
        path = str(Path(folder) / f"{first}.ckpt")
        model, trainer = fit_some(first, 1, make)
        trainer.save_checkpoint(path)
        model, trainer = fit_some(second, 2, make, path)
        found[f"{first} to {second}"] = outcome(model, trainer)
    model, trainer = fit_some(None, 2, make)
    found["at once"] = outcome(model, trainer)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [AdamLearner, AdafactorLearner, Convolution])
def test_checkpoints_are_the_same_file_with_and_without_it(tmp_path, make):
    (first, *_) = run_trainer_ranks(save_and_go_on, 2, str(tmp_path), make)
    for way in ("None to optimizer", "optimizer to None", "optimizer to optimizer"):
        assert_equal(Outcome([], first[way].weights), Outcome([], first["at once"].weights))
    whole, sharded = (torch.load(tmp_path / f"{shard}.ckpt", weights_only=True) for shard in BOTH)
    torch.testing.assert_close(sharded["optimizer_states"], whole["optimizer_states"], rtol=1e-7, atol=1e-7)
    assert list(sharded) == list(whole)
    assert (tmp_path / "optimizer.ckpt").stat().st_size < 1.1 * (tmp_path / "None.ckpt").stat().st_size


@pytest.mark.slow
def test_any_number_of_ranks_goes_on_with_a_checkpoint(tmp_path):
    path = str(tmp_path / "saved.ckpt")
    run_trainer_ranks(save, 3, path)
    whole, sharded = (run_trainer_ranks(go_on, 2, path, shard) for shard in BOTH)
    for actual, expected in zip(sharded, whole, strict=True):
        assert_equal(actual, expected)


def save(path: str) -> None:
    _, trainer = fit_some("optimizer", 1, AdamLearner)
    trainer.save_checkpoint(path)


def go_on(path: str, shard: str | None) -> Outcome:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The run is not continued exactly: 2 replicas")
        return outcome(*fit_some(shard, 2, AdamLearner, path))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")  # resumed without callbacks
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning")
@pytest.mark.parametrize(
    ("kind", "ranks", "chosen"),
    [
        pytest.param("sharded", 2, 3, id="smddp"),
        pytest.param(
            {"pipeline_parallel_size": 2, "shard": "optimizer"}, 4, 1, marks=pytest.mark.exhaustive, id="pipeline"
        ),
    ],
)
def test_a_run_goes_on_to_the_bit(kind: Any, ranks: int, chosen: int, tmp_path: Path) -> None:
    """From within an epoch, within accumulation, and at its end; with dropout."""
    body, scenario = resume_from_each, Scenario(accumulate=2, validate=2, epochs=2)
    assert run_trainer_ranks(body, ranks, kind, scenario, str(tmp_path), chosen, timeout=110) == [{}] * ranks


class GlobalNormOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(norm)
        return super().step(closure)


class Lbfgs(Short):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Zero(Short):
    def configure_optimizers(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, at its import
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.01)


def fit_sharded(make: Any) -> None:
    fit_some("optimizer", 1, make)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Lbfgs, "cannot shard LBFGS: its step needs all parameters and gradients at once"),
        pytest.param(
            *(Zero, "ZeroRedundancyOptimizer and shard='optimizer' both shard the optimizer"), marks=pytest.mark.slow
        ),
    ],
)
def test_what_cannot_be_is_an_error_on_every_rank(make, message):
    with pytest.raises(RanksFailedError, match=message) as failed:
        run_trainer_ranks(fit_sharded, 2, make)
    assert set(failed.value.tracebacks) == {0, 1}
    assert not failed.value.hung


class Failing(AdamLearner):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.shared = {p.data_ptr() for p in self.parameters()}
            raise RuntimeError("stop here")


def fail(folder: str) -> tuple[bool, bool]:
    """Whether parameters have memory of their own behind an error, and the optimizer has them."""
    model = Failing()
    saving = {"enable_checkpointing": True, "default_root_dir": folder, "callbacks": [OnExceptionCheckpoint(folder)]}
    trainer = make_trainer(silent(shard="optimizer"), **saving)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ours, and Lightning's where there is an OnExceptionCheckpoint
        with pytest.raises(RuntimeError, match="stop here"):
            trainer.fit(model)
    assert not list(Path(folder).rglob("*.ckpt"))
    grouped = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    is_own = model.shared.isdisjoint(p.data_ptr() for p in model.parameters())
    return is_own, grouped == {id(p) for p in model.parameters()}


def test_after_an_error_module_and_optimizer_are_whole_and_no_half_checkpoint_is_written(tmp_path):
    assert run_trainer_ranks(fail, 2, str(tmp_path)) == [(True, True)] * 2


def ask_for_state() -> tuple[list[int], str]:
    """How many parameters have a state in the whole one, and what the optimizer itself says."""
    _, trainer = fit_some("optimizer", 1, AdamLearner)
    whole = trainer.strategy.optimizer_state(trainer.optimizers[0])
    with pytest.raises(RuntimeError) as refused:
        trainer.optimizers[0].state_dict()
    assert copy.deepcopy(trainer.strategy)._scheme.sharded == []
    return list(whole["state"]), str(refused.value)


def test_the_whole_state_is_asked_of_the_strategy():
    results = run_trainer_ranks(ask_for_state, 2)
    assert [numbers for numbers, _ in results] == [[0, 1, 2, 3], []]
    for _, message in results:
        assert "With shard='optimizer' this rank has a share of AdamW's state" in message


def test_a_skipped_step_is_skipped_by_all():
    for expected, actual in run_trainer_ranks(train_skipping, 2):
        torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-7, atol=1e-7)


def train_skipping() -> list[Outcome]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*This step is left out")
        return [train("a skipped step", shard) for shard in BOTH]


@pytest.mark.slow
def test_two_nodes():
    cases, nodes = ["hooks that write", "whole parameters"], ["a", "a", "b", "b"]
    for results in run_trainer_ranks(train_both, 4, cases, node_ids=nodes):
        for expected, actual in results.values():
            assert_equal(actual, expected)
