"""Checkpoints of ``smddp_fsdp`` are those of one process: out of it, into it, and in another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_trainer_ranks
from tests.sharding.test_fsdp import Block, Short, Tied, fully_sharded
from tests.strategies.learners import Outcome, assert_equal, make_trainer, outcome, silent
from tests.strategies.pipeline_learners import run_each


class Momentum(Tied):
    """Of SGD's state there is one tensor for each parameter, which has its shape."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.05, momentum=0.9)


MODELS = {"adam": Tied, "momentum": Momentum}
STRATEGIES = {
    "smddp": lambda: silent(find_unused_parameters=True),
    "smddp_fsdp": fully_sharded,
    "sharded": lambda: fully_sharded(sharding="grad_op"),
    "auto": lambda: "auto",
}


def fit_some(strategy: str, model: str, epochs: int, path: str | None = None, save: str | None = None) -> Outcome:
    """Train until ``epochs``, maybe from ``path``, and save to ``save``."""
    learner = MODELS[model]()
    trainer = make_trainer(STRATEGIES[strategy](), max_epochs=epochs)
    trainer.fit(learner, ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return outcome(learner, trainer)


def save_and_go_on(saving: str, going_on: list[str], model: str, folder: str) -> tuple[Outcome, list[Outcome]]:
    """What training without a break leaves, and what it leaves under each strategy after one."""
    path = str(Path(folder) / "first.ckpt")
    fit_some(saving, model, 1, save=path)
    whole = fit_some("smddp", model, 2)
    return whole, [fit_some(strategy, model, 2, path) for strategy in going_on]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "model", "going_on"),
    [
        ("smddp_fsdp", "adam", ["smddp", "sharded"]),
        ("smddp", "momentum", ["smddp_fsdp"]),
    ],
)
def test_training_goes_on_under_each_strategy(saving, model, going_on, tmp_path):
    for whole, continued in run_trainer_ranks(save_and_go_on, 2, saving, going_on, model, str(tmp_path)):
        for actual in continued:
            expected = Outcome(whole.losses[-len(actual.losses) :], whole.weights)
            assert_equal(actual, expected, tolerance=1e-5)


def in_one_start(ranks: int, *fits: tuple[Any, ...]) -> list[Outcome]:
    """What each call of :func:`fit_some` with these arguments leaves, on the first rank."""
    return run_trainer_ranks(run_each, ranks, fit_some, fits)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The run is not continued exactly")
def test_the_file_is_that_of_plain_training_and_goes_on_in_any_number_of_ranks(tmp_path):
    mine, plain = str(tmp_path / "mine.ckpt"), str(tmp_path / "plain.ckpt")
    in_one_start(2, ("smddp_fsdp", "adam", 1, None, mine), ("smddp", "adam", 1, None, plain))
    own, other = (torch.load(path, weights_only=True) for path in (mine, plain))
    assert set(own) - set(other) == set()
    assert list(own["state_dict"]) == list(other["state_dict"])
    torch.testing.assert_close(own["state_dict"], other["state_dict"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own["optimizer_states"], other["optimizer_states"], rtol=1e-5, atol=1e-5)
    for strategies, ranks in ((["smddp_fsdp"], 3), (["smddp_fsdp", "auto"], 1)):
        fits = [(strategy, "adam", 2, path) for strategy in strategies for path in (mine, plain)]
        found = in_one_start(ranks, *fits)
        for with_mine, with_plain in zip(found[::2], found[1::2], strict=True):
            assert_equal(with_mine, with_plain, tolerance=1e-4)


class Evaluated(Short):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(8), Block(8))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.blocks(batch[0])

    def loss(self, batch: Any) -> Any:
        return super().loss([self.blocks(batch[0]), batch[1]])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def evaluate(strategy: str) -> list[Any]:
    model = Evaluated()
    trainer = make_trainer(STRATEGIES[strategy](), max_epochs=1)
    loader = model.train_dataloader()
    found = [trainer.validate(model, loader, verbose=False), trainer.test(model, loader, verbose=False)]
    trainer.fit(model)  # the module is whole again behind each run
    found.append(trainer.validate(model, loader, verbose=False))
    return [*found, trainer.predict(model, loader), model.blocks[0].mix.weight.detach()]


@pytest.mark.slow
def test_evaluation_and_one_module_in_several_runs():
    for expected, actual in run_trainer_ranks(run_each, 2, evaluate, [("smddp",), ("smddp_fsdp",)]):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


GOING_ON = ["smddp", "smddp_fsdp"]


def save_directory_and_go_on(path: str, plain: str) -> list[Outcome]:
    """From a directory and from a plain file, with each strategy."""
    trainer = make_trainer(fully_sharded(sharded=True), max_epochs=1)
    trainer.fit(Tied())
    trainer.save_checkpoint(path)
    fit_some("smddp", "adam", 1, save=plain)
    return [fit_some(strategy, "adam", 2, source) for strategy in GOING_ON for source in (path, plain)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The run is not continued exactly")
def test_directories_go_on_in_each_layout(tmp_path):
    path, plain = str(tmp_path / "parts.ckpt"), str(tmp_path / "plain.ckpt")
    found = run_trainer_ranks(save_directory_and_go_on, 2, path, plain)[0]
    assert sorted(child.name for child in Path(path).glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    found += in_one_start(3, *(("smddp_fsdp", "adam", 2, source) for source in (path, plain)))
    for from_parts, from_plain in zip(found[::2], found[1::2], strict=True):
        assert_equal(from_parts, from_plain, tolerance=1e-4)
