"""Checkpoints of ``smddp_fsdp`` are those of one process: out of it, into it, and in another number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks import run_trainer_ranks
from tests.sharding.test_fsdp import Block, Tied, fully_sharded
from tests.strategies.grouped import grouped
from tests.strategies.learners import Learner, Outcome, assert_equal, make_trainer, outcome, samples, silent


class Momentum(Tied):
    """Of SGD's state there is one tensor for each parameter, which has its shape."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.05, momentum=0.9)


class InRow(Learner):
    """For pipelines, too: what is tied or of no dimension has tests of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(8), Block(8))

    def loss(self, batch: Any) -> Any:
        return super().loss([self.blocks(batch[0]), batch[1]])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return DataLoader(samples(48), batch_size=4, sampler=DistributedSampler(samples(48), shuffle=False, **options))


def pipelined() -> Any:
    from lightning_smddp import PipelineStrategy

    return PipelineStrategy(**grouped(verbose=False))


MODELS = {"adam": Tied, "momentum": Momentum, "in a row": InRow}
STRATEGIES = {
    "smddp_pipeline": pipelined,
    "compressed": lambda: fully_sharded(compression="bf16"),
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


@pytest.mark.parametrize(
    ("saving", "model"), [("smddp_fsdp", "adam"), pytest.param("smddp", "momentum", marks=pytest.mark.slow)]
)
def test_training_goes_on_under_each_strategy(saving, model, tmp_path):
    going_on = ["smddp", "smddp_fsdp", "sharded"]
    for whole, continued in run_trainer_ranks(save_and_go_on, 2, saving, going_on, model, str(tmp_path)):
        for actual in continued:
            expected = Outcome(whole.losses[-len(actual.losses) :], whole.weights)
            assert_equal(actual, expected, tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:The run is not continued exactly")
def test_the_file_is_that_of_plain_training_and_goes_on_in_any_number_of_ranks(tmp_path):
    mine, plain = str(tmp_path / "mine.ckpt"), str(tmp_path / "plain.ckpt")
    run_trainer_ranks(fit_some, 2, "smddp_fsdp", "adam", 1, None, mine)
    run_trainer_ranks(fit_some, 2, "smddp", "adam", 1, None, plain)
    own, other = (torch.load(path, weights_only=True) for path in (mine, plain))
    assert set(own) - set(other) == set()
    assert list(own["state_dict"]) == list(other["state_dict"])
    torch.testing.assert_close(own["state_dict"], other["state_dict"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own["optimizer_states"], other["optimizer_states"], rtol=1e-5, atol=1e-5)
    for strategy, ranks in (("smddp_fsdp", 3), ("smddp_fsdp", 1), ("auto", 1)):
        with_mine, with_plain = (
            run_trainer_ranks(fit_some, ranks, strategy, "adam", 2, path)[0] for path in (mine, plain)
        )
        assert_equal(with_mine, with_plain, tolerance=1e-4)


@pytest.mark.filterwarnings("ignore:The run is not continued exactly")
def test_training_goes_on_in_a_pipeline_and_back(tmp_path):
    path = str(tmp_path / "first.ckpt")
    for saving, going_on in (("smddp_fsdp", "smddp_pipeline"), ("smddp_pipeline", "smddp_fsdp")):
        run_trainer_ranks(fit_some, 2, saving, "in a row", 1, None, path)
        # What ranks of a pipeline train on is one process's; what those of smddp_fsdp train on, smddp's.
        other, ranks = ("auto", 1) if going_on == "smddp_pipeline" else ("smddp", 2)
        expected = run_trainer_ranks(fit_some, ranks, other, "in a row", 2, path)[0]
        actual = run_trainer_ranks(fit_some, 2, going_on, "in a row", 2, path)[0]
        assert_equal(actual, expected, tolerance=1e-5)


def resume_compressed(folder: str) -> list[str]:
    path = str(Path(folder) / "first.ckpt")
    fit_some("compressed", "in a row", 1, save=path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_some("compressed", "in a row", 2, path)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("nodes", "loses"), [("ab", True), ("aa", False)])
def test_what_compression_remembers_is_missed(nodes, loses, tmp_path):
    said = run_trainer_ranks(resume_compressed, 2, str(tmp_path), node_ids=list(nodes))
    assert [any("what compression of gradients has lost" in text for text in texts) for texts in said] == [loses, False]


class Evaluated(Learner):
    def __init__(self) -> None:
        super().__init__()
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
    expected, actual = (run_trainer_ranks(evaluate, 2, strategy) for strategy in ("smddp", "smddp_fsdp"))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def save_directory(path: str) -> Outcome:
    """In training, and behind it."""
    learner = Tied()
    trainer = make_trainer(fully_sharded(sharded=True), max_epochs=1)
    trainer.fit(learner)
    trainer.save_checkpoint(path)
    return outcome(learner, trainer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The run is not continued exactly")
def test_directories_go_on_in_each_layout(tmp_path):
    path, plain = str(tmp_path / "parts.ckpt"), str(tmp_path / "plain.ckpt")
    run_trainer_ranks(save_directory, 2, path)
    assert sorted(child.name for child in Path(path).glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    run_trainer_ranks(fit_some, 2, "smddp", "adam", 1, None, plain)
    for strategy, ranks in (("smddp", 2), ("smddp_fsdp", 2), ("smddp_fsdp", 3)):
        from_parts, from_plain = (
            run_trainer_ranks(fit_some, ranks, strategy, "adam", 2, source) for source in (path, plain)
        )
        assert_equal(from_parts[0], from_plain[0], tolerance=1e-4)
