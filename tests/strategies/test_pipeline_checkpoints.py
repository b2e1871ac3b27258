"""Checkpoints are plain ones: saved and resumed with any number of stages, under any strategy, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import lr_scheduler
from torchmetrics.classification import MulticlassAccuracy

from lightning_smddp import PipelineStrategy
from lightning_smddp.resume.exact_resume import CHECKPOINT_KEY
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, IN_ANOTHER_LAYOUT, RESUMING, make_trainer
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Gpt, Matrix, assert_same, name_of, outcome

pytestmark = [*RESUMING, IN_ANOTHER_LAYOUT]


class Trained(Evaluated):
    """Adam, a scheduler, a hyperparameter, a metric whose state is saved, and something of the user's own."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__(layers, count=16)
        self.save_hyperparameters()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.accuracy.persistent(True)
        self.batches = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        out = self.net(batch[0])
        self.accuracy.update(out, batch[1])
        loss = torch.nn.functional.cross_entropy(out, batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.batches += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        return [optimizer], [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}]


EPOCHS, STEPS = 3, 2  # in all, and in each


def saving(directory: str) -> dict[str, Any]:
    checkpoint = ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
    return {"max_epochs": EPOCHS, "enable_checkpointing": True, "callbacks": [checkpoint]}


def train(strategy: Any, directory: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Body of a rank, and of one process: all epochs, or what is left of them from a checkpoint on."""
    if isinstance(strategy, dict):
        strategy = PipelineStrategy(**grouped(verbose=False, **strategy))
    model = Trained()
    trainer = make_trainer(strategy, **saving(directory))
    trainer.fit(model, ckpt_path=ckpt_path)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return outcome(model, trainer, batches=model.batches, rates=rates)


def assert_same_checkpoint(path: Path, expected: Path, tolerance: float = 1e-5) -> None:
    """Same keys, and same values apart from where the files are."""
    ours, theirs = torch.load(path, weights_only=False), torch.load(expected, weights_only=False)
    assert [key for key in ours if key != CHECKPOINT_KEY] == [key for key in theirs if key != CHECKPOINT_KEY]
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "loops", "batches"):
        assert_same(ours[key], theirs[key], tolerance, f"{path.name}[{key!r}]")
    assert ours["hyper_parameters"] == theirs["hyper_parameters"]


@pytest.mark.slow
def test_saves_what_one_process_saves_and_what_that_goes_on_from(tmp_path: Path) -> None:
    alone, piped = tmp_path / "alone", tmp_path / "piped"
    expected = train("auto", str(alone))
    run_trainer_ranks(train, 2, {}, str(piped))
    for epoch in range(EPOCHS):
        assert_same_checkpoint(piped / f"epoch={epoch}.ckpt", alone / f"epoch={epoch}.ckpt")
    result = train("auto", str(tmp_path), str(piped / "epoch=0.ckpt"))
    assert_same(result, {**expected, "losses": expected["losses"][STEPS:]})
    ours, theirs = (Trained.load_from_checkpoint(path / "epoch=2.ckpt") for path in (piped, alone))
    assert_same(ours.state_dict(), theirs.state_dict())
    assert ours.hparams == {"layers": 5}


# ---- in one session ----


def fit_again(bench: Bench) -> Any:
    """With the same Trainer, then with another one."""
    model = Trained()
    trainer = bench.trainer(max_epochs=1)
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    again = outcome(model, trainer)
    with torch.no_grad():  # rounding has grown by now
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).sin().view_as(parameter))
    return again, bench.fit(model, max_epochs=1)


def best_and_last(bench: Bench) -> Any:
    model = Trained()
    checkpoint = ModelCheckpoint(bench.directory, "best", monitor="val_loss", save_last=True)
    trainer = bench.trainer(callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(model)
    best = trainer.test(model, ckpt_path="best", verbose=False)
    validated = trainer.validate(model, ckpt_path="last", verbose=False)
    predicted = trainer.predict(model, ckpt_path=checkpoint.best_model_path)
    return best, validated, predicted, outcome(model, trainer)


def tied(bench: Bench) -> Any:
    """A shared weight, under both of its names: for `tests/gpu`; on CPUs `test_layouts.py` has one."""
    model = Gpt()
    trainer = bench.trainer(max_epochs=1)
    trainer.fit(model)
    path = Path(bench.directory, "tied.ckpt")
    trainer.save_checkpoint(path)
    other = Gpt()
    trainer = bench.trainer(max_epochs=2)
    trainer.fit(other, ckpt_path=path)
    return torch.load(path, weights_only=False)["state_dict"], outcome(other, trainer)


CASES: list[Case] = [fit_again, best_and_last]
UNCHECKED = {"check": False}  # how they compute is compared here
TWO = Matrix(CASES, pipeline=UNCHECKED)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case, tmp_path_factory: Any) -> None:
    TWO.compare(case, str(tmp_path_factory.getbasetemp() / "checkpoints"))
