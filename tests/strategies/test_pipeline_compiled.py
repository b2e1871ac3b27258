"""Compiled code in a pipeline: eager where the step is followed, compiled inside units, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.pipeline_learners import Bench, Case, Matrix, Net, name_of, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # dynamo's own are many
_compilations: list[str] = []


def counting(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """A backend that does nothing but count."""
    _compilations.append("graph")
    return graph.forward


@torch.compile(backend=counting)
def between(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(x * 2) * scale + x.mean(1, keepdim=True)


class Function(Net):
    """Calls a compiled function, which uses a parameter, between modules."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        self.scale = nn.Parameter(torch.ones(16))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net[4:](between(self.net[:4](batch[0]), self.scale)), batch[1])


def function(bench: Bench) -> Any:
    return bench.fit(Function(), max_epochs=1, limit_train_batches=2)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradients[0]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.linear(x)) + between(x, self.linear.bias)  # type: ignore[no-untyped-call, no-any-return]


class Modules(Net):
    """Modules compiled in place, one of them with a hook, and wrapped ones."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        for place in (2, 4):
            self.net[place] = Odd()
            self.net[place].compile(backend=counting)
        self.net[4].register_forward_hook(lambda module, args, output: output * 2)
        self.net[6] = torch.compile(self.net[6], backend=counting)


def modules_checkpointed(bench: Bench) -> Any:
    """Some on each rank."""
    return bench.fit(
        Modules(), {"activation_checkpointing": True, "split": ["net.5"]}, max_epochs=1, limit_train_batches=2
    )


def whole(bench: Bench) -> Any:
    model: Any = torch.compile(Net(), backend=counting)
    trainer = bench.trainer(max_epochs=1, limit_train_batches=2)
    trainer.fit(model)
    return outcome(model._orig_mod, trainer)


CASES = [function, modules_checkpointed, whole]


def something_was_compiled(bench: Bench) -> Any:
    return len(_compilations) > 0


TWO = Matrix([*CASES, something_was_compiled])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_process(case: Case) -> None:
    TWO.compare(case)


@pytest.mark.slow
def test_units_run_compiled() -> None:
    assert all(TWO.results(something_was_compiled))
