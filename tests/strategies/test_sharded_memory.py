"""With ``sharded=True`` no rank holds more than its stage, neither for saving nor for loading: measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smddp import PipelineStrategy
from lightning_smddp.checkpoint.sharded import load
from tests.growth import Growth, measurable
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import make_trainer

WIDTH, LAYERS, RANKS = 512, 32, 2
WEIGHTS = LAYERS * WIDTH * WIDTH * 4 / 2**20  # MiB of the model; Adam has two times as much


class Wide(LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(12, WIDTH)), 4)


class Started(Callback):
    """Until the first step is over. It holds no numbers that a thread changes: a step would take them for its own."""

    def __init__(self, most: Callable[[], float]) -> None:
        self.most, self.before_first_batch = most, 0.0

    def on_train_start(self, *args: Any) -> None:
        self.before_first_batch = self.most()


class Saves(Callback):
    """Saves in both ways, and measures."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.growth: dict[bool, float] = {}

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for sharded in (True, False):
            strategy = trainer.strategy
            strategy._reliability = dataclasses.replace(strategy._reliability, sharded=sharded)
            growth = Growth(RANKS)
            with growth.watching():
                trainer.save_checkpoint(f"{self.directory}/{sharded}.ckpt")
            self.growth[sharded] = growth.most / 2**20


def measure(directory: str) -> Any:
    measurable()
    options: dict[str, Any] = {"meta_init": True, "verbose": False, "sharded": True, "num_microbatches": 2}
    options["split"] = [f"layers.{LAYERS // RANKS}"]  # not by measured times, which are seldom those of equal layers
    saves = Saves(directory)
    trainer = make_trainer(PipelineStrategy(**grouped(**options)), max_steps=3, callbacks=[saves])
    trainer.fit(Wide())
    held = sum(p.nbytes for p in trainer.lightning_module.parameters() if not p.is_meta) / 2**20
    del trainer
    growth = Growth(RANKS)
    started = Started(lambda: growth.most / 2**20)
    again = make_trainer(PipelineStrategy(**grouped(**options)), max_steps=4, max_epochs=9, callbacks=[started])
    with growth.watching():
        again.fit(Wide(), ckpt_path=f"{directory}/True.ckpt")
    states = [again.strategy.optimizer_state(optimizer)["state"] for optimizer in again.optimizers]
    moments = sum(state["exp_avg"].nbytes for state in states[0].values()) / 2**20
    return saves.growth, held, moments, started.before_first_batch, growth.most / 2**20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Loss and gradients were not compared:UserWarning")
def test_no_rank_holds_more_than_its_stage(tmp_path: Path) -> None:
    results = run_trainer_ranks(measure, RANKS, str(tmp_path))
    stage = WEIGHTS / RANKS
    for growth, held, moments, before_first_batch, most in results:
        assert held == pytest.approx(stage)
        assert moments == pytest.approx(stage)
        assert growth[True] < stage / 2, "saving copies one tensor at a time"
        assert before_first_batch < stage / 2, "loading reads nothing before it is known whose it is"
        assert most < 5 * stage + 16, "a stage's weights, gradients and moments, and a layer's activations"
    assert results[0][0][False] > 3 * stage * 0.9, "the control: one file takes the other stage's weights and moments"
    assert len(load(tmp_path / "True.ckpt")["state_dict"]) == LAYERS
