"""Values that Python reads from tensors between modules go to later stages with the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, name_of

ONE = {"num_microbatches": 1, "schedule": "gpipe"}


class Encoder(nn.Module):
    """Returns a distribution, which validates its arguments."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.mean, self.spread = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.mean(x), self.spread(x).exp())


class Variational(Net):
    """A distribution between encoder and decoder."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        self.encoder = Encoder()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        q = self.encoder(self.net[:3](batch[0]))
        divergence = kl_divergence(q, Normal(torch.zeros(16), torch.ones(16))).mean()
        out = self.net[3:](q.mean + 0 * q.rsample())
        return F.cross_entropy(out, batch[1]) + 0.1 * divergence - 0.01 * q.log_prob(q.mean.detach()).mean()


def variational(bench: Bench) -> Any:
    return bench.fit(Variational())


class Numbers(Net):
    """Checks an activation, logs a number of it, and computes with others, before more modules."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        if torch.isnan(x).any():
            raise ValueError("not a number")
        assert x.isfinite().all()
        self.log("mean", x.mean().item())
        best = x.argmax(1).tolist()
        x = x * (1 + max(best) / 100 + x.detach().std(1).mean().item())
        return F.cross_entropy(self.net[4:](x), batch[1])


def numbers(bench: Bench) -> Any:
    return bench.fit(Numbers(layers=6), ONE)


class Decides(nn.Module):
    """Decides by an activation, behind its own modules but before others of the step."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        if x.max() > 0.5:
            x = x * 2
        return x


class Inside(Net):
    def __init__(self) -> None:
        super().__init__(layers=5)
        self.net.insert(4, Decides())


def inside_a_module(bench: Bench) -> Any:
    return bench.fit(Inside(), ONE)


CASES = [variational, inside_a_module]
TWO = Matrix(CASES)
THREE, MORE = Matrix([numbers], 3), Matrix([variational], 3, {"schedule": "gpipe"})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.slow
def test_numbers_pass_through_stages() -> None:
    THREE.compare(numbers)


@pytest.mark.exhaustive
def test_distributions_pass_through_stages() -> None:
    MORE.compare(variational)
