"""What a step does behind its last module changes in mid-training: its weights are compared again, or it runs whole."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net


class Spreading(Net):
    """From the fourth step on rows are to be far from each other, a little."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        if self.global_step >= 3:
            loss = loss - 1e-3 * out.mean(1).std()
        self.losses.append(loss.item())
        return loss


class Summing(Net):
    """A mean in the first epoch, a sum in the second: other words for the same function."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum" if self.current_epoch else "mean")
        self.losses.append(loss.item())
        return loss


class Accumulating(Net):
    """A sum from the third batch on, the first of two that accumulate."""

    first = 2

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        loss = losses.sum() if batch_idx >= self.first else losses.mean()
        self.losses.append(loss.item())
        return loss


class SummingLate(Accumulating):
    """A sum from the second batch on: that adds to the first one's gradient."""

    first = 1


class Harmless(Net):
    """Logs in some batches, with a penalty that is a mean over rows; loops as long as the data wants."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        if batch_idx % 3 == 2:
            self.log("largest", out.detach().abs().amax(1).mean())
        if self.current_epoch:
            loss = loss + 0.1 * out.pow(2).mean()
        steps = out.detach()
        while steps.norm() > 0.1 * (1 + batch_idx % 3):
            steps = steps / 2
        self.losses.append(loss.item())
        return loss


class Logging(Net):
    """Logs from the second batch on, and more in the second epoch: what is no mean over rows."""

    spreads = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        if batch_idx >= 1:
            self.log("total", out.detach().abs().sum(), reduce_fx="max")
        if self.current_epoch and self.spreads:
            self.log("spread", out[:, 0].std(correction=0))
        return loss


class LoggingSpread(Logging):
    """Also what no rule makes of micro-batches'."""

    spreads = True


class LoggingOnce(Net):
    """Logs a total in every fourth batch, whose gradients are added to those of the batch before."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        if batch_idx % 4 == 3:
            self.log("total", out.detach().abs().sum(), reduce_fx="min")
        return F.cross_entropy(out, batch[1])


class CallingAgain(Net):
    """Calls its first modules again, behind the last one, in the second epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.current_epoch:
            loss = loss + 0.1 * self.net[:2](batch[0] * 0.5).pow(2).mean()
        self.losses.append(loss.item())
        return loss


class Differentiating(Net):
    """A penalty on the gradient of its first weight, in the second epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.current_epoch:
            (gradient,) = torch.autograd.grad(loss, self.net[0].weight, create_graph=True)
            loss = loss + gradient.pow(2).sum()
        self.losses.append(loss.item())
        return loss


def told(bench: Bench, model: Callable[[], Net], expected: str, pipeline: Any = None, **options: Any) -> Any:
    """What was trained; with a warning on the first rank that has ``expected`` in it, if any."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bench.fit(model(), pipeline, max_epochs=2, **options)
    found = [str(warning.message) for warning in caught if "raining step" in str(warning.message)]
    first = bench.pipeline is not None and dist.get_rank() == 0
    assert [expected in text for text in found] == [True] * (first and bool(expected)), found
    return result


SOMETHING_ELSE = "does something else than in the first batch"
CASES = {
    "spreading": functools.partial(told, model=Spreading, expected=SOMETHING_ELSE),
    "accumulating": functools.partial(told, model=Accumulating, expected=SOMETHING_ELSE, accumulate_grad_batches=2),
    "harmless, accumulated": functools.partial(told, model=Harmless, expected="", accumulate_grad_batches=2),
    "logging more": functools.partial(told, model=LoggingSpread, expected="shows what parts of a batch do not make up"),
    "calling again": functools.partial(told, model=CallingAgain, expected="is run as a whole on every rank"),
}
MORE_CASES = {
    "summing": functools.partial(told, model=Summing, expected=SOMETHING_ELSE),
    "harmless": functools.partial(told, model=Harmless, expected=""),
    "logging": functools.partial(told, model=Logging, expected=""),
    "logging once": functools.partial(told, model=LoggingOnce, expected="", accumulate_grad_batches=2),
    "differentiating": functools.partial(told, model=Differentiating, expected="is run as a whole on every rank"),
    "differentiating, where weights are looked at": functools.partial(
        told, model=functools.partial(Differentiating, count=32), expected="is run as a whole on every rank"
    ),
}


def refused_late(bench: Bench) -> str:
    with pytest.raises(RuntimeError) as caught:
        bench.fit(SummingLate(), max_epochs=1, accumulate_grad_batches=2)
    return str(caught.value)


TWO = Matrix([*CASES.values(), refused_late])
MORE = Matrix(list(MORE_CASES.values()))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES.values(), ids=list(MORE_CASES))
def test_more_equal_one_process(case: Case) -> None:
    MORE.compare(case)


@pytest.mark.slow
def test_a_batch_that_counts_already_ends_the_run_with_a_cure() -> None:
    for message in TWO.results(refused_late):
        assert SOMETHING_ELSE in message
        assert "`ckpt_path`" in message
