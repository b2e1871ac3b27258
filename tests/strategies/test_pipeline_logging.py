"""What users see of a run: logged values, metrics, outputs, loggers. Every rank shows what one process would."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.learners import CLASSES, samples
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, Net, name_of, outcome

# Lightning's advice on integers is no reason not to reduce them.
pytestmark = pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning")

# ---- self.log ----


class Logs(Net):
    """Every form of ``self.log``, in every place."""

    def __init__(self) -> None:
        super().__init__(batch_size=7, count=18)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        correct = (out.argmax(1) == batch[1]).float()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", out.max(), reduce_fx="max", on_epoch=True, on_step=False)
        self.log("smallest", out.min(), reduce_fx=torch.min, on_epoch=True, on_step=True)
        self.log("correct", correct.sum(), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("correct_float", float(correct.sum()), reduce_fx=sum, on_epoch=True)
        self.log("batch_idx", batch_idx)
        self.log("constant", 3.5, on_epoch=True, rank_zero_only=False)
        self.log("weighted", correct.mean(), batch_size=len(batch[1]), on_epoch=True)
        self.log_dict({"a": loss * 2, "b": out.detach().mean()}, on_step=False, on_epoch=True)
        return {"loss": loss, "correct": correct, "count": len(correct)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.log("outputs", outputs["correct"].mean(), on_epoch=True)
        self.log("count", float(outputs["count"]), reduce_fx="sum", on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", float(self.current_epoch))
        self.log("at_epoch_end_synced", float(self.current_epoch), sync_dist=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_named", loss, add_dataloader_idx=False) if dataloader_idx == 0 else None
        self.log("val_sum", loss * len(batch[1]), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", 1.0 + self.current_epoch)

    def val_dataloader(self) -> Any:
        return [DataLoader(samples(20), batch_size=6), DataLoader(samples(11), batch_size=4)]


class Recorder(Callback):
    """Logged values after every batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        for kind in (trainer.logged_metrics, trainer.progress_bar_metrics, trainer.callback_metrics):
            self.seen.append({name: float(value) for name, value in sorted(kind.items())})

    on_validation_batch_end = on_train_batch_end


def logs(bench: Bench) -> Any:
    recorder = Recorder()
    trainer = bench.trainer({"num_microbatches": 3}, callbacks=[recorder], log_every_n_steps=1)
    model = Logs()
    trainer.fit(model)
    return outcome(model, trainer, seen=recorder.seen)


# ---- torchmetrics ----


# ---- outputs ----


# ---- loggers and callbacks ----


class Early(Evaluated):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        # Gets worse from the second epoch on.
        self.log("val_loss", self.loss(batch).detach() * 0 + 1 + float(self.current_epoch))


def early_stopping(bench: Bench) -> Any:
    return bench.fit(Early(count=8), max_epochs=6, callbacks=[EarlyStopping("val_loss", patience=2)])


def loggers(bench: Bench) -> Any:
    found = [CSVLogger(bench.directory, "csv", version=0), TensorBoardLogger(bench.directory, "tensorboard", version=0)]
    callbacks = [LearningRateMonitor("step")]
    trainer = bench.trainer(logger=found, callbacks=callbacks, log_every_n_steps=2, enable_model_summary=True)
    model = Evaluated(count=24)
    trainer.fit(model)
    trainer.test(model, verbose=False)
    for logger in found:
        logger.finalize("success")
    torch.distributed.barrier() if torch.distributed.is_initialized() else None
    with open(Path(bench.directory, "csv", "version_0", "metrics.csv")) as file:
        return [
            {name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)
        ], trainer.log_dir.removeprefix(bench.directory)


# ---- a validation that uses nothing of the last stage ----


class Idle(Net):
    def __init__(self) -> None:
        super().__init__()
        self.regularised = torch.nn.Linear(CLASSES, 1)
        torch.nn.init.constant_(self.regularised.weight, 0.1)
        torch.nn.init.zeros_(self.regularised.bias)
        self.accuracy, self.error = MulticlassAccuracy(CLASSES), torchmetrics.MeanSquaredError()

    def loss(self, batch: list[Tensor]) -> Tensor:
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) + self.regularised(out).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self.net(batch[0])
        self.accuracy(out.softmax(1), batch[1])
        self.error(out[:, 0].detach(), batch[1].float())
        self.log("accuracy", self.accuracy)
        self.log("error", self.error)
        self.log("val_loss", F.cross_entropy(out, batch[1]))

    def val_dataloader(self) -> Any:
        return DataLoader(samples(16), batch_size=8)


def idle_in_validation(bench: Bench) -> Any:
    # Behind `net` there is no module that the last stage could begin with.
    warnings.filterwarnings("ignore", "`validation_step` runs in lockstep")
    return bench.fit(Idle(), pipeline={"split": ["regularised"]}, max_epochs=1)


CASES = [
    idle_in_validation,
    logs,
    early_stopping,
    loggers,
]
TWO = Matrix(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case, tmp_path_factory: Any) -> None:
    TWO.compare(case, str(tmp_path_factory.getbasetemp() / "logging"))
