"""What users look at while they train: histograms on the first rank, metrics of each epoch, files of predictions."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MetricTracker
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.learners import CLASSES, samples
from tests.strategies.pipeline_learners import Bench, Case, Evaluated, Matrix, name_of


class Histograms(Evaluated):
    """On all ranks but the first, ``self.logger.experiment`` does nothing with what it is given."""

    def on_train_epoch_end(self) -> None:
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(name, parameter, self.current_epoch)
            if parameter.grad is not None:
                self.logger.experiment.add_histogram(f"{name}.grad", parameter.grad.cpu().numpy(), self.current_epoch)
            self.losses.append(float(parameter.detach().std()))


def histograms(bench: Bench) -> Any:
    return bench.fit(Histograms(), logger=TensorBoardLogger(bench.directory))


class Tracked(Evaluated):
    """A metric of its own for each epoch, made when the epoch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MulticlassAccuracy(CLASSES), maximize=True)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.tracker.update(logits.detach(), batch[1])
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("accuracy", self.tracker.compute())
        self.losses += [self.tracker.best_metric(), *self.tracker.compute_all().tolist()]


def tracked(bench: Bench) -> Any:
    return bench.fit(Tracked(), max_epochs=3)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.seen: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, rows: Any, *rest: Any) -> None:
        self.seen.append((prediction, None if rows is None else list(rows)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, rows: Any) -> None:
        self.seen.append((predictions, rows))


def predictions(bench: Bench) -> Any:
    writer = Writer()
    trainer = bench.trainer(callbacks=[writer])
    return trainer.predict(Evaluated(), DataLoader(samples(20), batch_size=8)), writer.seen


CASES: list[Case] = [histograms, tracked, predictions]
MATRIX = Matrix(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    MATRIX.compare(case)
