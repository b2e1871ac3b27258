"""The comparison before training: two micro-batches in the pipeline against a plain loop over them on one rank."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.pipeline.partition.self_check import VerificationError
from tests.strategies.pipeline_learners import Bench, Cases, Gpt, Net


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.BatchNorm1d(16)


class Counting(Net):
    """Keeps what no step reads."""

    calls = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.calls += 1
        self.last = loss.detach()
        return loss


class Wrong(Net):
    """Of a pipeline whose second micro-batch counts too much."""

    def on_fit_start(self) -> None:
        original = LightningStep.loss

        def loss(step: LightningStep, microbatch: Any, result: Any) -> Any:
            found = original(step, microbatch, result)
            return found if microbatch.weight > 0.5 or found is None else 1.1 * found

        LightningStep.loss = loss  # type: ignore[method-assign]
        self.put_back = functools.partial(setattr, LightningStep, "loss", original)

    def on_exception(self, *args: Any) -> None:
        self.put_back()


class Undeclared(Metric):
    """It has a gradient, and does not say so."""

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, logits: Tensor) -> None:
        self.total = self.total + logits.square().mean()

    def compute(self) -> Tensor:
        return self.total


class Declared(Undeclared):
    is_differentiable = True


class WithMetric(Net):
    """A metric is a part of the loss."""

    def __init__(self, metric: type[Undeclared] = Undeclared) -> None:
        super().__init__()
        self.metric = metric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return F.cross_entropy(logits, batch[1]) + self.metric(logits)


class WithDeclaredMetric(WithMetric):
    def __init__(self) -> None:
        super().__init__(Declared)


def checked(make: Callable[[], Any], options: dict[str, Any]) -> Any:
    """What the check found: its comparisons, or its error."""
    model = make()
    trainer = Bench({"num_microbatches": 4, **options}).trainer(max_epochs=1, limit_train_batches=1)
    findings: list[Any] = []
    model.on_train_batch_end = lambda *args: findings.extend(trainer.strategy.findings)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*changed inside of modules that are placed whole")
            trainer.fit(model)
    except VerificationError as error:
        getattr(model, "put_back", lambda: None)()
        return str(error)
    return [(finding.name, finding.expected, finding.actual) for finding in findings]


RIGHT: list[tuple[Any, dict[str, Any]]] = [
    (Net, {}),
    (Dropping, {}),
    (Normed, {}),
    (Counting, {}),
    (Gpt, {}),
    (WithDeclaredMetric, {}),
]
WRONG: list[tuple[Any, dict[str, Any]]] = [(Wrong, {}), (WithMetric, {})]
ON_TWO = Cases(checked, [*RIGHT, *WRONG])
REPLICAS: list[tuple[Any, dict[str, Any]]] = [(Net, {"pipeline_parallel_size": 2, "compression": "int8"})]
ON_FOUR = Cases(checked, REPLICAS, 4)
DIFFERS = "The pipeline does not compute what the step computes on one rank"


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case[0].__name__)
def test_what_is_right_trains(case: Any) -> None:
    for findings in ON_TWO.results(case):
        names = [name for name, _, _ in findings]
        assert names[0] == "loss"
        assert len(names) > 4
        for _, expected, actual in findings:
            assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_replicas_are_compared_without_compression() -> None:
    for findings in ON_FOUR.results(REPLICAS[0]):
        for _, expected, actual in findings:
            assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_wrong_weights_of_micro_batches_are_caught() -> None:
    for text in ON_TWO.results(WRONG[0]):
        assert DIFFERS in text


def test_a_metric_in_the_loss_has_to_say_that_it_is_differentiable() -> None:
    for text in ON_TWO.results(WRONG[1]):
        assert DIFFERS in text
        assert "a metric in the loss that does not say `is_differentiable = True`" in text
