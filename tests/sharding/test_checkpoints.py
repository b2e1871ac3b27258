"""Checkpoints of what shards are those of plain training: out of it, into it, and in another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_smddp.checkpoint.sharded import load as load_directory
from tests.ranks import run_each, run_trainer_ranks
from tests.sharding.learners import Block, Convolution, Factored, Tied, Validating, fully_sharded, sharded
from tests.strategies.learners import AllSteps, Learner, Outcome, assert_equal, make_trainer, outcome, silent
from tests.strategies.pipeline_learners import once

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The run is not continued exactly")]


class Momentum(Tied):
    """Of SGD's state there is one tensor for each parameter, which has its shape."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.05, momentum=0.9)


def by_norm(average: torch.Tensor, now: torch.Tensor, count: Any) -> torch.Tensor:
    """A user's own, which looks at all of a parameter."""
    return torch.lerp(average, now, min(1.0, 0.1 * now.norm().item()))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "smddp": lambda: silent(find_unused_parameters=True),
    "shard": lambda: sharded(find_unused_parameters=True),
    "fsdp": fully_sharded,
    "grad_op": lambda: fully_sharded(sharding="grad_op"),
    "directory": lambda: fully_sharded(sharded=True, async_save=True),
    "auto": lambda: "auto",
}
AVERAGES: dict[str, Callable[[], Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "own function": lambda: WeightAveraging(avg_fn=by_norm, use_buffers=False),
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
}
MODELS = {"tied": Tied, "momentum": Momentum, "factored": Factored, "convolution": Convolution}
MODELS["statistics"] = Convolution
# Of each case: who saves, and who goes on with that.
WAYS: dict[str, dict[str, list[str]]] = {
    "tied": {
        "smddp": ["shard", "fsdp"], "shard": ["smddp", "shard"], "fsdp": ["smddp", "grad_op"],
        "directory": ["smddp", "fsdp"],
    },
    "momentum": {"smddp": ["fsdp"]},
    "factored": {"smddp": ["shard"], "shard": ["smddp"]},
    "convolution": {"smddp": ["shard"], "shard": ["smddp"]},
    "statistics": {"smddp": [], "directory": []},
    **{average: {"smddp": ["fsdp"], "fsdp": ["smddp"]} for average in AVERAGES},
}  # fmt: skip


class Saving(Callback):
    """Saves behind each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def train(case: str, strategy: str, callbacks: list[Callback], path: Path | None = None) -> Outcome:
    """Train to the end, maybe from ``path``."""
    average = [AVERAGES[case]()] if case in AVERAGES else []
    model = MODELS.get(case, Validating)()
    trainer = make_trainer(STRATEGIES[strategy](), callbacks=average + callbacks, max_epochs=2 + len(average))
    trainer.fit(model, ckpt_path=path)
    return outcome(model, trainer)


def train_and_go_on(case: str, folder: Path) -> dict[str, Outcome]:
    """What training leaves at once, and from the first epoch's checkpoint on."""
    found = {}
    for saving, others in WAYS[case].items():
        found[saving] = train(case, saving, [Saving(folder / saving)])
        for other in others:
            found[f"{saving} to {other}"] = train(case, other, [], folder / saving / "0.ckpt")
    return found


def parts_of(path: Path) -> tuple[list[list[str]], dict[str, Any]]:
    """What is compared of a checkpoint: its names in their order, and its values."""
    saved = torch.load(path, map_location="cpu", weights_only=False)
    names = ("state_dict", "optimizer_states", "current_model_state", "averaging_state")
    swa = saved["callbacks"].get("StochasticWeightAveraging", {})
    average = {name: swa.get(name) for name in ("average_model_state", "n_averaged")}
    return [list(saved), list(saved["state_dict"])], {**{name: saved.get(name, {}) for name in names}, **average}


def check_ways(case: str, folder: Path, of_shard: tuple[float, float] = (1e-6, 1e-7)) -> None:
    """``of_shard``: how near ``shard="optimizer"`` comes to plain training, by results and by files."""
    check(case, folder, run_trainer_ranks(train_and_go_on, 2, case, folder, timeout=110.0), of_shard)


def check(case: str, folder: Path, of_ranks: list[Any], of_shard: tuple[float, float] = (1e-6, 1e-7)) -> None:
    for results in of_ranks:
        whole = results.pop("smddp")
        for way, actual in results.items():
            expected = Outcome(whole.losses[-len(actual.losses) :], whole.weights, whole.metrics)
            try:
                assert_equal(actual, expected, 1e-5 if "fsdp" in way or "directory" in way else of_shard[0])
            except AssertionError as error:
                raise AssertionError(f"{way}: {error}") from None
    plain = folder / "smddp" / "1.ckpt"
    names, values = parts_of(plain)
    for kind, bound in (("shard", of_shard[1]), ("fsdp", 1e-5)):
        if kind in WAYS[case]:
            other = folder / kind / "1.ckpt"
            found, actual = parts_of(other)
            assert found == names, kind
            torch.testing.assert_close(actual, values, rtol=bound, atol=bound, check_device=False)
            assert other.stat().st_size < 1.1 * plain.stat().st_size


DONE: dict[Any, Any] = {}


def train_all(folder: Path) -> list[Any]:
    """In one process of a rank, as starting it takes longer than a case."""
    return [train_and_go_on(case, folder / case) for case in WAYS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", WAYS)
def test_they_are_the_same_and_each_strategy_goes_on(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "ways"
    everyones = once(DONE, None, lambda: run_trainer_ranks(train_all, 2, folder, timeout=280.0))
    check(case, folder / case, [of_rank[list(WAYS).index(case)] for of_rank in everyones])
    if case == "tied":
        parts = folder / "tied" / "directory" / "0.ckpt"
        assert sorted(child.name for child in parts.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
        go_on_in_other_numbers_of_ranks(folder / "tied")
    if case == "statistics":  # each rank has statistics of its own batches: the first one's count
        plain = torch.load(folder / case / "smddp" / "1.ckpt", weights_only=False)
        saved = load_directory(folder / case / "directory" / "1.ckpt")
        torch.testing.assert_close(saved["state_dict"], plain["state_dict"], rtol=1e-5, atol=1e-5)


OTHER_RANKS = {
    3: [("smddp", "shard"), ("shard", "shard"), ("shard", "fsdp"), ("fsdp", "shard"), ("fsdp", "directory")],
    1: [("auto", "smddp"), ("auto", "fsdp"), ("fsdp", "directory")],
}


def go_on_in_other_numbers_of_ranks(folder: Path) -> None:
    for ranks, ways in OTHER_RANKS.items():
        fits = [("tied", strategy, [], folder / saving / "0.ckpt") for strategy, saving in ways]
        expected, *others = run_trainer_ranks(run_each, ranks, train, fits)[0]
        for actual, (strategy, saving) in zip(others, ways[1:], strict=True):
            assert_equal(actual, expected, tolerance=1e-6 if strategy == saving == "shard" else 1e-4)


class Evaluated(AllSteps, Learner):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(8), Block(8))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.blocks(batch[0])

    def loss(self, batch: Any) -> Any:
        return super().loss([self.blocks(batch[0]), batch[1]])


def evaluate(strategy: str) -> list[Any]:
    model = Evaluated()
    trainer = make_trainer(STRATEGIES[strategy](), max_epochs=1)
    loader = model.train_dataloader()
    found = [trainer.validate(model, loader, verbose=False), trainer.test(model, loader, verbose=False)]
    trainer.fit(model)  # the module is whole again behind each run
    found.append(trainer.validate(model, loader, verbose=False))
    return [*found, trainer.predict(model, loader), model.blocks[0].mix.weight.detach()]


def test_evaluation_and_one_module_in_several_runs() -> None:
    for expected, actual in run_trainer_ranks(run_each, 2, evaluate, [("smddp",), ("fsdp",)]):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
