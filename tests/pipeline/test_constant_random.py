"""Random numbers that are constants: some rows give the same alone as among others, whatever draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from lightning_smddp.pipeline.capture.constant_random import without_chance
from lightning_smddp.pipeline.capture.own_seeds import seed_torch
from lightning_smddp.pipeline.capture.python_random import PythonRandom, SharedRandom

WIDTH = 16
CPU = torch.device("cpu")


class Noisy(torch.autograd.Function):
    """Draws in its forward and in its backward, where function modes do not look."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand(())


def of_module(make: Callable[[], nn.Module]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        seed_torch(0)
        module = make()
        seed_torch(int(x.sum().abs() * 1e6))
        result = module(x)
        return result[0] if isinstance(result, tuple) else result

    return run


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout of channels": lambda x: F.dropout1d(x, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "encoder": of_module(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.5, batch_first=True)),
    "lstm": of_module(lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "autograd function": Noisy.apply,
    "rand": lambda x: x * torch.rand_like(x) + torch.rand(x.shape),
    "randn": lambda x: x * torch.randn_like(x) + torch.randn(x.shape),
    "randint": lambda x: torch.randint(0, 9, x.shape) + torch.randint_like(x, 3, 9),
    "randperm": lambda x: x + torch.randperm(WIDTH),
    "normal of tensors": lambda x: torch.normal(x, x.exp()),
    "normal of numbers": lambda x: torch.normal(0.0, 1.0, x.shape),
    "in place": lambda x: x * torch.empty_like(x).uniform_(-1, 3) + torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "poisson": lambda x: torch.poisson(x.exp()),
    "multinomial": lambda x: torch.multinomial(x[:, 0].softmax(-1), 3),
    "binomial": lambda x: distributions.Binomial(5, x.sigmoid()).sample(),
    "gamma": lambda x: distributions.Gamma(x.exp(), 1.0).rsample(),
    "beta": lambda x: distributions.Beta(x.exp(), x.exp()).rsample(),
    "dirichlet": lambda x: distributions.Dirichlet(x.exp()).rsample(),
    "laplace": lambda x: distributions.Laplace(x, 1.0).rsample(),
    "categorical": lambda x: distributions.Categorical(logits=x).sample(),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", DRAWS)
def test_rows_are_the_same_alone(name: str, mode: Any) -> None:
    draw, x = DRAWS[name], torch.randn(6, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    with mode(), without_chance(CPU):
        x.requires_grad_(mode is torch.enable_grad)
        together, alone = draw(x), torch.cat([draw(x[:2]), draw(x[2:])])
        torch.testing.assert_close(together, alone)
        if together.requires_grad:
            first, second = (torch.autograd.grad(result.sum(), x)[0] for result in (together, alone))
            torch.testing.assert_close(first, second)
            assert first.isfinite().all()


def with_own_generator() -> Tensor:
    return torch.rand(3, generator=torch.Generator().manual_seed(3))


def with_default_generator() -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.rand(3)


@pytest.mark.parametrize("draw", [with_own_generator, with_default_generator])
def test_what_a_step_seeds_is_no_chance(draw: Callable[[], Tensor]) -> None:
    """Each micro-batch would draw the same: trials have to see that as one process's step does."""
    expected = draw()
    with without_chance(CPU):
        torch.testing.assert_close(draw(), expected)
        assert torch.rand(3).unique().numel() == 1


def test_generators_that_modules_hold_are_chance_until_the_step_seeds_them() -> None:
    module = nn.Linear(1, 1)
    module.generator = torch.Generator().manual_seed(3)
    sources = PythonRandom(module)
    random = SharedRandom(sources, sources.get())
    expected = torch.rand(3, generator=torch.Generator().manual_seed(3))
    with without_chance(CPU), random.at(0):
        assert torch.rand(3, generator=module.generator).unique().numel() == 1
        module.generator.manual_seed(3)
        torch.testing.assert_close(torch.rand(3, generator=module.generator), expected)
    torch.testing.assert_close(torch.rand(3, generator=module.generator), expected)


def test_rows_that_change_places_do_not_stay_where_they_are() -> None:
    """A loss between rows and shuffled ones was zero in trials, whatever the rows."""
    with without_chance(CPU):
        order = torch.randperm(6)
    assert not (order == torch.arange(6)).any()
    assert order.sort().values.tolist() == list(range(6))


def test_what_is_drawn_afterwards_is_random() -> None:
    with without_chance(CPU):
        assert torch.rand(3).unique().numel() == 1
    assert torch.rand(3).unique().numel() == 3
