"""Modules that other people write: experts, scripted parts, and sharpness, which is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, name_of


class Expert(nn.Module):
    """Rows go where a gate sends them: the sizes inside of this module depend on values."""

    def __init__(self, width: int = 16, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        chosen = weights.argmax(1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return x + out


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__(layers=5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.net[3], self.net[5] = Expert(), Expert()


class Sharpness(torch.optim.SGD):
    """Steps uphill by all gradients' norm, asks for gradients there, and steps downhill from where it was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
        torch.enable_grad()(closure)()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
        super().step()
        return loss


class Sharp(Net):
    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters(), lr=0.1, momentum=0.9)


def refusal(bench: Bench, model: Any) -> str:
    try:
        bench.fit(model, {"num_microbatches": 4})
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def sharpness(bench: Bench) -> str:
    return refusal(bench, Sharp())


def experts(bench: Bench) -> Any:
    return bench.fit(Mixture(), {"num_microbatches": 4})


class Chosen(Net):
    """Between modules it goes on with the rows that a module's values choose."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.net[:4](batch[0])
        x = x[x.sum(1) > 0]
        return self.net[4:](x).pow(2).sum() / len(batch[0])


def chosen(bench: Bench) -> Any:
    return bench.fit(Chosen(), {"num_microbatches": 4})


def _smooth(x: Tensor, slope: float) -> Tensor:
    return torch.where(x > 0, x, slope * x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that it is deprecated
    smooth: Any = torch.jit.script(_smooth)


class Smooth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return smooth(x, 0.1)


class ScriptedInside(Net):
    """A function that is scripted, inside a module."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        self.net[1] = Smooth()


class Scripted(ScriptedInside):
    """And between modules."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.net[4:](smooth(self.net[:4](batch[0]), 0.2))
        loss = F.cross_entropy(out, batch[1])
        self.losses.append(loss.item())
        return loss


def scripted(bench: Bench) -> str:
    return refusal(bench, Scripted())


def scripted_inside(bench: Bench) -> Any:
    return bench.fit(ScriptedInside(), {"num_microbatches": 4})


CASES: list[Case] = [scripted_inside, experts, chosen]
TWO = Matrix([*CASES, sharpness, scripted])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_numbers_are_one_processs(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_needs_all_gradients_is_refused() -> None:
    for text in TWO.results(sharpness):
        assert "Sharpness needs the gradients of all parameters in one place" in text
        assert "strategy='smddp'" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scripted_code_between_modules_is_refused_with_its_place() -> None:
    for text in TWO.results(scripted):
        assert "test_more_causes.py:" in text
        assert "strategy='smddp'" in text
