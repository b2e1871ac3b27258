"""A loss that changes in mid-training by numbers alone: an annealed weight finds other weights of micro-batches."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net
from tests.strategies.test_late_tails import SOMETHING_ELSE, told


class Annealed(Net):
    """A mean, and a sum whose weight grows from zero."""

    def penalty(self, out: Tensor) -> Tensor:
        return out.pow(2).sum()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        beta = min(1.0, max(0, self.global_step - 3) / 20)
        loss = 1.0 * F.cross_entropy(out, batch[1]) + beta * self.penalty(out)
        self.losses.append(loss.item())
        return loss


class AnnealedMean(Annealed):
    """The same with a mean: the weights fit."""

    def penalty(self, out: Tensor) -> Tensor:
        return out.pow(2).mean()


class Between(Net):
    """The weight is given to an operation between two modules."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.net[:2](batch[0])
        penalty = hidden.pow(2).sum() * (0.1 * self.current_epoch)
        loss = F.cross_entropy(self.net[2:](hidden), batch[1]) + penalty
        self.losses.append(loss.item())
        return loss


class InALoop(Net):
    """Weights that one line takes from a list."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        terms = [F.cross_entropy(out, batch[1]), out.pow(2).sum()]
        loss = out.new_zeros(())
        for weight, term in zip([1.0, 1.0 * (self.current_epoch > 0)], terms, strict=True):
            loss = loss + weight * term
        self.losses.append(loss.item())
        return loss


class Penalised(nn.Module):
    """A loss module with a weight of its own, which is the last unit."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) + self.beta * out.pow(2).sum()


class KeptByAModule(Net):
    """A hook changes an attribute of a module, which nobody outside is given."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Penalised()

    def on_train_epoch_start(self) -> None:
        self.last.beta = 0.1 * self.current_epoch

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.last(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


class KeptInABuffer(Net):
    """The weight is a buffer, which a hook writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        self.beta.fill_(0.1 * self.current_epoch)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1]) + self.beta * out.pow(2).sum()
        self.losses.append(loss.item())
        return loss


class GivenToAModule(Net):
    """The weight is an argument of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Weighted()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.last(self.net(batch[0]), batch[1], beta=0.1 * self.current_epoch)
        self.losses.append(loss.item())
        return loss


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor, beta: float) -> Tensor:
        out = out * (1 + self.shift)
        return F.cross_entropy(out, target) + beta * out.pow(2).sum()


CASES = {
    "annealed": functools.partial(told, model=Annealed, expected=SOMETHING_ELSE),
    "between modules": functools.partial(told, model=Between, expected=SOMETHING_ELSE),
    "kept by a module": functools.partial(told, model=KeptByAModule, expected=SOMETHING_ELSE),
    "given to a module": functools.partial(told, model=GivenToAModule, expected=SOMETHING_ELSE),
    "kept in a buffer": functools.partial(told, model=KeptInABuffer, expected=SOMETHING_ELSE),
    "annealed, a mean": functools.partial(told, model=AnnealedMean, expected=""),
}
IN_A_LOOP = functools.partial(told, model=InALoop, expected=SOMETHING_ELSE)


class Hidden(Net):
    """A module that asks something else for its weight: only a trial from time to time shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Asking({"beta": 0.0})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last.settings["beta"] = 0.1 * (self.global_step >= 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.last(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


class Asking(nn.Module):
    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) + self.settings["beta"] * out.pow(2).sum()


def told_late(bench: Bench) -> list[str]:
    """What is said of it on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bench.fit(Hidden(), max_epochs=2)
    return [str(warning.message) for warning in caught if "the loss is another than" in str(warning.message)]


@pytest.mark.slow
def test_what_nobody_sees_shows_in_a_trial_of_its_own() -> None:
    first, second = TWO.results(told_late)
    assert len(first) == 1
    assert first[0].startswith("At batch 0 of epoch 1")
    assert "From here on each batch runs as one micro-batch" in first[0]
    assert second == []


class Normed(Net):
    """Its statistics are those of a micro-batch, where the number of these is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


def told_of_norms(bench: Bench) -> None:
    told(bench, Normed, "it changes the buffers", {"num_microbatches": 2})


TWO, MORE = Matrix([*CASES.values(), told_late, told_of_norms]), Matrix([IN_A_LOOP])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.exhaustive
def test_weights_in_a_loop() -> None:
    MORE.compare(IN_A_LOOP)


@pytest.mark.slow
def test_batch_norm_is_no_loss_that_changes() -> None:
    assert TWO.results(told_of_norms) == [None, None]  # told as it expects
