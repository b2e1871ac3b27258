"""Micro-batches in one process, against loops written by hand, whole batches, and Lightning's own accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_smddp import AccumulationStrategy
from tests.strategies.learners import CLASSES, QUIET, samples
from tests.strategies.pipeline_learners import Net

ROWS, COUNT = 8, 20  # the last batch has 4 rows

Step = Callable[["Model", Any], Any]


class Model(Net):
    """``step`` is its training step."""

    def __init__(self, step: Step, batches: Any = None) -> None:
        super().__init__(layers=2, batch_size=ROWS, count=COUNT)
        self.step, self.batches, self.seen = step, batches, []
        self.accuracy, self.mean = MulticlassAccuracy(CLASSES, average="micro"), MeanMetric()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Overridden with parameters of its own, as packages do."""
        super().log(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def predict_step(self, batch: Any) -> Any:
        return self.step(self, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)

    def train_dataloader(self) -> Any:
        if isinstance(self.batches, list):  # which Lightning takes for a list of loaders
            return DataLoader(self.batches, batch_size=None)
        return self.batches or super().train_dataloader()


def train(step: Step, parts: int = 0, batches: Any = None, options: Any = (), **settings: Any) -> tuple[Model, Trainer]:
    """Under the strategy, or without ``parts`` under Lightning's own."""
    model = Model(step, batches)
    strategy = AccumulationStrategy(parts, **dict(options)) if parts else "auto"
    trainer = Trainer(strategy=strategy, **{"max_epochs": 2, **QUIET, **settings})
    trainer.fit(model)
    return model, trainer


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


def cut_by_hand(batch: list[Tensor], parts: int) -> list[list[Tensor]]:
    return [list(part) for part in zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True)]


@pytest.mark.parametrize("parts", [1, 3, 100])
def test_a_mean_over_rows_is_the_whole_batchs(parts: int) -> None:
    def step(model: Model, batch: Any) -> Tensor:
        loss = model.loss(batch)
        model.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    model, trainer = train(step, parts)
    whole, expected = train(step)
    assert_same_weights(model, whole)
    torch.testing.assert_close(model.seen, whole.seen)
    assert trainer.global_step == expected.global_step == 6
    torch.testing.assert_close(trainer.callback_metrics, expected.callback_metrics)


class Labels:
    """Tensors that are cut together by slices, as in a TensorDict."""

    def __init__(self, classes: Tensor) -> None:
        self.classes = classes

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, rows: Any) -> Labels:
        return Labels(self.classes[rows])


def test_objects_and_lists_with_an_entry_for_each_row_are_cut_by_slices() -> None:
    def step(model: Model, batch: Any) -> Tensor:
        assert (len(batch["names"]), batch["tag"]) == (len(batch["x"]), "train")
        return model.loss([batch["x"], batch["y"].classes])

    batches = list(DataLoader(samples(COUNT), batch_size=ROWS))
    named = [{"x": x, "y": Labels(y), "names": [*map(str, y)], "tag": "train"} for x, y in batches]
    assert_same_weights(train(step, 2, named)[0], train(Model.loss, 2, batches)[0])


def test_gradients_are_those_of_lightnings_accumulation() -> None:
    """Four batches of two rows of Lightning's are one of ours in four parts; hooks of parameters come for each part."""
    found: dict[str, list[Tensor]] = {}

    def hooked(name: str) -> Step:
        found[name] = []

        def step(model: Model, batch: Any) -> Tensor:
            if not found[name]:
                model.net[0].bias.register_hook(lambda gradient: found[name].append(gradient.clone()))
                found[name].append(torch.zeros(16))
            # Not a mean over rows of the whole batch: of two rows at a time.
            return model.loss(batch) * model.net(batch[0]).std()

        return step

    model, trainer = train(hooked("parts"), 4, DataLoader(samples(16), batch_size=8))
    loader = DataLoader(samples(16), batch_size=2)
    other, expected = train(hooked("batches"), 0, loader, accumulate_grad_batches=4)
    assert_same_weights(model, other)
    assert trainer.global_step == expected.global_step == 4
    assert len(found["parts"]) == len(found["batches"]) == 17
    torch.testing.assert_close(found["parts"], found["batches"])


def test_logs_and_metrics_are_those_of_a_loop() -> None:
    def step(model: Model, batch: Any) -> Tensor:
        logits = model.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        model.log("mean", loss.item())
        model.log("uniform", loss, batch_size=1)
        model.log("sum", loss, reduce_fx="sum")
        model.log("max", loss, reduce_fx=torch.max)
        model.log("min", loss, reduce_fx="min")
        if len(batch[0]) == 2:
            model.log("sometimes", loss)
        model.log("shown", loss, True)  # `prog_bar` by position
        model.log("twice", 1.0, on_step=False, on_epoch=True)
        model.log("twice", 2.0, on_step=False, on_epoch=True)
        model.accuracy(logits, batch[1])
        model.log("accuracy", model.accuracy, on_step=True, on_epoch=True)
        model.mean.update(loss, len(batch[0]))
        model.log("mean_metric", model.mean, on_step=False, on_epoch=True)
        return loss

    batch = next(iter(DataLoader(samples(7), batch_size=7)))
    model, trainer = train(step, 3, [batch], max_epochs=1)

    fresh = Model(step)
    parts = cut_by_hand(batch, 3)
    logits = [fresh.net(part[0]) for part in parts]
    losses = [F.cross_entropy(one, part[1]).item() for one, part in zip(logits, parts, strict=True)]
    right = [float((one.argmax(1) == part[1]).float().mean()) for one, part in zip(logits, parts, strict=True)]
    expected = {
        "mean": (3 * losses[0] + 2 * losses[1] + 2 * losses[2]) / 7,
        "uniform": sum(losses) / 3,
        "shown": (3 * losses[0] + 2 * losses[1] + 2 * losses[2]) / 7,
        "sum": sum(losses),
        "max": max(losses),
        "min": min(losses),
        "sometimes": (losses[1] + losses[2]) / 2,
        "twice": 1.5,
        "accuracy_step": (3 * right[0] + 2 * right[1] + 2 * right[2]) / 7,
        "accuracy_epoch": (3 * right[0] + 2 * right[1] + 2 * right[2]) / 7,
        "mean_metric": (3 * losses[0] + 2 * losses[1] + 2 * losses[2]) / 7,
    }
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found == pytest.approx({**expected, "accuracy": expected["accuracy_epoch"]})
    assert set(trainer.progress_bar_metrics) == {"shown"}


def test_what_cannot_run_is_refused() -> None:
    model = Model(Model.loss)
    model.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic optimization"):
        Trainer(strategy=AccumulationStrategy(2), max_epochs=1, **QUIET).fit(model)
    with pytest.raises(ValueError, match="loss_weight='mask' does not fit the batch"):
        train(Model.loss, 2, None, {"loss_weight": "mask"})
