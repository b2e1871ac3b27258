"""Parameters that are unfrozen in mid-training: DDP by itself would let ranks drift apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor

from tests.ranks import run_trainer_ranks
from tests.strategies.learners import Learner, Outcome, assert_equal, fit, silent
from tests.strategies.pipeline_learners import Cases
from tests.strategies.test_fabric import make_fabric, network


class FrozenFirst(Learner):
    """Its first layer is frozen until something unfreezes it."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.net[0].requires_grad_(False)


class WithBackbone(Learner):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.backbone, self.head = self.net[:2], self.net[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class UnfreezesAtBatch(Callback):
    """Within a window of accumulation, whose first gradients are there already."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            pl_module.net[0].requires_grad_(True)


@dataclass(frozen=True)
class Case:
    model: type[Learner]
    options: dict[str, Any] = field(default_factory=dict)
    callback: Callable[[], Any] | None = None
    strategy: dict[str, Any] = field(default_factory=dict)


CASES = {
    "BackboneFinetuning": Case(
        WithBackbone, callback=partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1), strategy={"algorithm": "auto"}
    ),
    "within accumulation": Case(FrozenFirst, {"accumulate_grad_batches": 2}, UnfreezesAtBatch),
    "sharded": Case(FrozenFirst, callback=UnfreezesAtBatch, strategy={"shard": "optimizer"}),
}


def train(case: str, strategy: Any, ranks: int = 1) -> Outcome:
    given = CASES[case]
    options = dict(given.options)
    if given.callback is not None:
        options["callbacks"] = [given.callback()]
    return fit(strategy, given.model(4 * ranks, 48), max_epochs=2, **options)


def train_all() -> dict[str, Outcome]:
    return {case: train(case, silent(**{"algorithm": "shared_memory", **CASES[case].strategy})) for case in CASES}


@pytest.mark.slow
def test_what_is_unfrozen_later_is_trained_as_in_one_process() -> None:
    first, second = run_trainer_ranks(train_all, 2)
    for case in CASES:
        alone = train(case, "auto", ranks=2)
        joined = [sum(losses) / 2 for losses in zip(first[case].losses, second[case].losses, strict=True)]
        try:
            torch.testing.assert_close(first[case].weights, second[case].weights, rtol=0.0, atol=0.0)
            assert_equal(Outcome(joined, first[case].weights), Outcome(alone.losses, alone.weights), 1e-5)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


class UnfreezesInStep(FrozenFirst):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


def train_unfreezing_in_step() -> None:
    fit(silent(), UnfreezesInStep())


def train_with_fabric() -> None:
    fabric = make_fabric("smddp")
    fabric.launch()
    module = network()
    module[0].requires_grad_(False)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    module[0].requires_grad_(True)
    fabric.backward(model(torch.ones(4, 8)).sum())
    optimizer.step()


def refused(body: Callable[[], None]) -> str:
    with pytest.raises(RuntimeError) as caught:
        body()
    return str(caught.value)


CURES = {(train_unfreezing_in_step,): "on_train_epoch_start", (train_with_fabric,): "fabric.setup"}
REFUSED = Cases(refused, [*CURES])


@pytest.mark.parametrize("case", CURES)
def test_gradients_that_nobody_averages_are_an_error(case: Any) -> None:
    for message in REFUSED.results(case):
        assert re.search(r"2 parameters .* its own copy of (net\.)?0\.weight", message)
        assert CURES[case] in message
