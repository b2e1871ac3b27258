"""Callbacks that average weights, under ``smddp_fsdp``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from tests.ranks import run_trainer_ranks
from tests.sharding.test_fsdp import Tied, fully_sharded
from tests.strategies.learners import Outcome, assert_equal, make_trainer, outcome, silent


class Averaged(Tied):
    """Validates with the average."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Saving(Callback):
    """Saves behind each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def by_norm(average: torch.Tensor, now: torch.Tensor, count: Any) -> torch.Tensor:
    """A user's own, which looks at all of a parameter."""
    return torch.lerp(average, now, min(1.0, 0.1 * now.norm().item()))


CALLBACKS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "own function": lambda: WeightAveraging(avg_fn=by_norm, use_buffers=False),
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
}


def train(case: str, strategy: Any, folder: Path, resumed: Path | None = None) -> Outcome:
    model = Averaged()
    trainer = make_trainer(strategy, callbacks=[CALLBACKS[case](), Saving(folder)], max_epochs=3)
    trainer.fit(model, ckpt_path=resumed)
    trainer.validate(model, verbose=False)
    return outcome(model, trainer)


def train_both(case: str, folder: Path, options: dict[str, Any]) -> dict[str, Outcome]:
    plain = silent(find_unused_parameters=True)
    found = {
        "plain": train(case, plain, folder / "plain"),
        "divided": train(case, fully_sharded(**options), folder / "divided"),
        "from plain": train(case, fully_sharded(**options), folder / "other", folder / "plain" / "0.ckpt"),
    }
    again = silent(find_unused_parameters=True)
    found["from divided"] = train(case, again, folder / "last", folder / "divided" / "0.ckpt")
    return found


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("ema", {}),
        pytest.param("own function", {}, marks=pytest.mark.slow),
        pytest.param("swa", {}, marks=pytest.mark.slow),
    ],
)
def test_averages_are_those_of_data_parallelism(case, options, tmp_path):
    ranks = 4 if options else 2
    for results in run_trainer_ranks(train_both, ranks, case, tmp_path, options):
        expected = results["plain"]
        assert_equal(results["divided"], expected, tolerance=1e-5)
        for resumed in ("from plain", "from divided"):
            torch.testing.assert_close(results[resumed].weights, expected.weights, rtol=1e-5, atol=1e-5)
    files = [torch.load(tmp_path / name / "1.ckpt", weights_only=False) for name in ("plain", "divided")]
    kept = [{key: file.get(key, {}) for key in SAVED} | swa_average(file) for file in files]
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-5, atol=1e-5)


SAVED = ["state_dict", "current_model_state", "averaging_state"]


def swa_average(file: Any) -> dict[str, Any]:
    state = file["callbacks"].get("StochasticWeightAveraging", {})
    return {key: state[key] for key in ("average_model_state", "n_averaged") if key in state}
