"""Training with ``smddp`` gives what it gives with ``ddp``, and in one process on the ranks' batches joined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from tests.strategies.learners import (
    CLASSES,
    AllSteps,
    Learner,
    Learning,
    Outcome,
    assert_equal,
    fit,
    make_trainer,
    outcome,
    samples,
)
from tests.strategies.pipeline_learners import Cases, call

# Lightning's advice on integers is no reason not to reduce them.
pytestmark = pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning")


class Manual(Learner):
    """Two optimizers, stepped by hand; the second every other batch, after two backward passes."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        first, second = self.net[0].parameters(), self.net[2].parameters()
        return torch.optim.SGD(first, lr=0.1), torch.optim.Adam(second, lr=0.01)


class ChangingUse(Learner):
    """Which of two heads is used depends on the batch and on the rank; a third one is never used."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.heads = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.heads[(batch_idx + self.global_rank) % 2](self.net(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss


class LightningsSampler(Learner):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.count), batch_size=self.batch_size, shuffle=True)


class Logging(Learner):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("rank", float(self.global_rank), sync_dist=True)
        self.log("int", torch.tensor(2 * self.global_rank), sync_dist=True, on_step=False, on_epoch=True)
        self.log("largest", float(self.global_rank), sync_dist=True, reduce_fx="max")
        self.log("total", float(self.global_rank + 1), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


@dataclass(frozen=True)
class Case:
    model: type[Learner] = Learner
    options: dict[str, Any] = field(default_factory=dict)
    ddp: str = "ddp"
    smddp: str = "smddp"
    batch_size: int = 4
    count: int = 24
    single: float | None = 1e-6  # how close to one process, whose sums have another order; None: not comparable

    def make(self, ranks: int = 1) -> Learner:
        return self.model(self.batch_size * ranks, self.count)


CASES = {
    "plain": Case(),
    "accumulation": Case(options={"accumulate_grad_batches": 3}, count=32),  # the last window has one batch
    "clip-norm": Case(options={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}),
    "bf16-mixed": Case(options={"precision": "bf16-mixed"}, single=0.02),
    "64-true": Case(options={"precision": "64-true"}),
    "manual": Case(model=Manual, single=1e-5),
    "unused": Case(
        ChangingUse, ddp="ddp_find_unused_parameters_true", smddp="smddp_find_unused_parameters_true", single=None
    ),
    "uneven-last-batch": Case(batch_size=5, count=26),
    "lightnings-sampler": Case(model=LightningsSampler, single=None),
}


def fit_case(name: str) -> list[Outcome]:
    case = CASES[name]
    return [fit(strategy, case.make(), **case.options) for strategy in (case.ddp, case.smddp)]


EVERYDAY = Cases(fit_case, [(name,) for name in CASES])


@pytest.mark.parametrize("name", CASES)
def test_equals_ddp_and_one_process(name: str) -> None:
    case = CASES[name]
    results = EVERYDAY.results((name,))
    for stock, ours in results:
        assert_equal(ours, stock)
    assert_equal(results[0][1], Outcome(results[0][1].losses, results[1][1].weights, results[1][1].metrics), 0.0)
    assert len(set(results[0][1].losses)) > 4
    if case.single is not None:
        alone = fit("auto", case.make(ranks=2), **case.options)
        joined = [sum(losses) / 2 for losses in zip(*(ours.losses for _, ours in results), strict=True)]
        assert_equal(Outcome(joined, results[0][1].weights), Outcome(alone.losses, alone.weights), case.single)


# ---- callbacks, evaluation, several runs ----


class Evaluated(AllSteps, Logging):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        # From the second epoch on it is better on rank 0, and worse on rank 1 and in their mean.
        worse = self.current_epoch * (self.global_rank - 0.25)
        self.log("val_loss", self.loss(batch).detach() * 0 + 1 + worse, sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(1)


def stop_early(strategy: str) -> int:
    trainer = make_trainer(strategy, max_epochs=6, callbacks=[EarlyStopping("val_loss", patience=2)])
    trainer.fit(Evaluated())
    return int(trainer.current_epoch)


@pytest.mark.slow
def test_early_stopping_stops_all_ranks_at_once() -> None:
    assert SLOW.results((stop_early, "smddp")) == [3, 3]


def evaluate(strategy: str) -> tuple[float, float, list[int], Outcome]:
    model = Evaluated()
    trainer = make_trainer(strategy)
    (validated,) = trainer.validate(model, verbose=False)
    trainer.fit(model)
    (tested,) = trainer.test(model, verbose=False)
    predicted = torch.cat(trainer.predict(model)).tolist()
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model)  # again, with the same Trainer
    return validated["val_loss"], tested["test_loss"], predicted, outcome(model, trainer)


@pytest.mark.slow
def test_validate_fit_test_predict_and_fit_again() -> None:
    of_ranks = zip(SLOW.results((evaluate, "ddp")), SLOW.results((evaluate, "smddp")), strict=True)
    for (*expected, trained), (*actual, ours_trained) in of_ranks:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert_equal(ours_trained, trained)
        assert len(trained.losses) == 12
        assert len(expected[2]) == 12


# ---- the other package ----


def fit_with_pytorch_lightning(strategy: str) -> Outcome:
    import pytorch_lightning

    class Other(Learning, pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.build()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if strategy != "smddp":
                self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def train_dataloader(self) -> Any:
            data, ranks = samples(self.count), self.trainer.distributed_sampler_kwargs
            sampler: Any = DistributedSampler(data, shuffle=False, **ranks) if ranks else None
            return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    trainer = make_trainer(strategy, pytorch_lightning.Trainer)
    if strategy != "auto":
        assert type(trainer.strategy).__module__ == "lightning_smddp.strategies.pytorch_lightning"
    assert not isinstance(trainer, Trainer)
    assert not issubclass(Other, LightningModule)
    model = Other()
    trainer.fit(model)
    return outcome(model, trainer)


OTHERS = [(fit_with_pytorch_lightning, "smddp"), (fit_with_pytorch_lightning, "smddp_pipeline")]
SLOW = Cases(call, [(stop_early, "smddp"), (evaluate, "ddp"), (evaluate, "smddp"), *OTHERS])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["smddp", "smddp_pipeline"])
def test_pytorch_lightning(strategy: str) -> None:
    if strategy == "smddp":
        (expected, _), _ = EVERYDAY.results(("plain",))
        assert_equal(SLOW.results(OTHERS[0])[0], expected)
        return
    expected = fit_with_pytorch_lightning("auto")
    for result in SLOW.results(OTHERS[1]):
        result.losses = expected.losses  # in a pipeline the step keeps one for each micro-batch
        assert_equal(result, expected, 1e-5)
