"""What steps measure, log and set where each rank has several stages: as where one process accumulates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_smddp import PipelineStrategy
from lightning_smddp.strategies.lightning import AccumulationStrategy
from tests.ranks import run_trainer_ranks
from tests.strategies.grouped import grouped
from tests.strategies.learners import CLASSES, INPUTS, make_trainer, samples
from tests.strategies.pipeline_learners import assert_same


class Net(LightningModule):
    """Five batches of 8 rows, the last one of 6."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh())
            self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
            self.third = nn.Linear(16, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.logits(batch[0]), batch[1])

    def logits(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(38), batch_size=8)

    def shown(self) -> Any:
        """What has to be equal."""
        return None


class Metrics(Net):
    """Called on activations of the first stage, and of the last; logged as objects, values, and collections."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.both = MetricCollection({"error": MeanSquaredError(), "total": SumMetric()})
        self.val_accuracy = MulticlassAccuracy(CLASSES)
        self.all = CatMetric()
        self.matrix = MulticlassConfusionMatrix(CLASSES)
        self.square = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.first(batch[0])
        self.all.update(h[:, 0])
        self.log("half", 0.5 * self.square(h[:, 0].detach(), batch[1].float()))
        logits = self.third(self.second(h))
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("of_batch", self.both["error"](logits[:, 0], h[:, 0]))
        self.both["total"].update(logits.sum())
        matrix = self.matrix(logits, batch[1])
        self.log("corner", matrix[0, 0].float() + matrix[0, 1], reduce_fx="sum")
        return F.cross_entropy(logits, batch[1]) + 0.1 * self.square(logits[:, 0], batch[1].float())

    def on_train_epoch_end(self) -> None:
        self.computed = [self.all.compute(), self.both.compute(), self.matrix.compute(), self.square.compute()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_accuracy.update(self.logits(batch[0]), batch[1])
        self.log("val_accuracy", self.val_accuracy)

    val_dataloader = Net.train_dataloader

    def shown(self) -> Any:
        return self.computed, {name: float(value) for name, value in self.trainer.callback_metrics.items()}


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.sum += value * count
        self.count += count


class Attributes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.correct = torch.zeros((), dtype=torch.long)
        self.seen: list[Tensor] = []
        self.by_name: dict[str, list[float]] = {"loss": []}
        self.meter = Meter()
        self.stages = nn.Sequential(self.first, self.second)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        h = self.stages(batch[0])
        self.activation = self.stages[0](batch[0]).detach()
        logits = self.third(h)
        self.correct += (logits.argmax(1) == batch[1]).sum()
        self.seen.append(logits.detach())
        loss = F.cross_entropy(logits, batch[1])
        self.by_name["loss"].append(loss.item())
        self.meter.update(loss.item(), len(logits))
        self.last = {"loss": loss.item(), "labels": batch[1]}
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.total = getattr(self, "total", 0) + len(self.logits(batch[0]))

    val_dataloader = Net.train_dataloader

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at_hook = self.calls, self.activation.clone(), self.correct.clone()

    def shown(self) -> Any:
        state = (self.calls, self.correct, self.seen, self.by_name, vars(self.meter), self.last, self.total)
        return state, self.at_hook


class LogsInside(nn.Module):
    def __init__(self, owner: list[Any], inner: nn.Module) -> None:
        super().__init__()
        self.owner, self.inner = owner, inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.owner[0].log("constant", 1.5)
        self.owner[0].log("inside", x.mean())
        self.owner[0].total(x.sum())
        return x


class Nested(Net):
    """A module of the first stage logs, and calls a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()
        self.first = LogsInside([self], self.first)

    def on_train_epoch_end(self) -> None:
        self.log("total", self.total.compute())

    def shown(self) -> Any:
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}


MODELS = [Metrics, Attributes, Nested]


def fit(model: Net, strategy: Any) -> Any:
    torch.manual_seed(3)
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(model)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return weights, (trainer.global_step, trainer.current_epoch), model.shown()


def pipelined() -> list[Any]:
    options = {"num_microbatches": 4, "loss_weight": "rows", "schedule": "interleaved_1f1b"}
    return [fit(model(), PipelineStrategy(**grouped(**options, verbose=False))) for model in MODELS]


@pytest.mark.timeout(300)
def test_all_ranks_have_what_accumulation_has_where_each_has_several_stages() -> None:
    ranks = run_trainer_ranks(pipelined, 2, timeout=240)
    for index, model in enumerate(MODELS):
        expected = fit(model(), AccumulationStrategy(4, device=torch.device("cpu")))
        for rank, found in enumerate(ranks):
            assert_same(found[index], expected, 1e-4, f"{model.__name__} on rank {rank}")
