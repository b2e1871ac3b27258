from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smddp.bridge.partitioning import _first_values
from lightning_smddp.pipeline.mesh import held_parameters
from lightning_smddp.pipeline.state.meta_parameters import initialize_deferred, parameters_on_meta
from tests.pipeline.models import OWNERSHIP, Tied, assert_same
from tests.pipeline.test_transformers import gpt2, llama

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """Draws random numbers for two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))
        self.register_buffer("frequencies", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first)
        nn.init.normal_(self.second)
        self.frequencies.copy_(torch.arange(3.0))


class Refining(Scaled):
    """Fills a parameter, and replaces it by another one."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.first = nn.Parameter(self.first.detach() / 2)


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Root(nn.Module):
    """As transformers' models: one method for all modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(500, 500), Uninitialised(), Uninitialised())

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Uninitialised):
            nn.init.ones_(module.weight)
        if isinstance(module, Root):  # GPT-2's blocks scale what is inside them like this
            nn.init.normal_(module.inner[0].weight, std=0.01)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with parameters_on_meta():
        return build()


def all_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def test_values_do_not_depend_on_the_division() -> None:
    whole = on_meta(Tied)
    initialize_deferred(whole, all_names(whole), CPU, seed=3)
    for rank in range(2):
        part = on_meta(Tied)
        torch.manual_seed(rank)  # and not on the ranks' generators, which stay as they are
        state = torch.get_rng_state()
        initialize_deferred(part, held_parameters(part, OWNERSHIP, rank), CPU, seed=3)
        assert torch.equal(state, torch.get_rng_state())
        for name, parameter in part.named_parameters():
            if OWNERSHIP.is_mine(name, rank):
                assert_same(parameter.detach(), dict(whole.named_parameters())[name].detach())
            else:
                assert parameter.is_meta
        assert part.head.weight is part.embedding.weight is part.favourites[0]
    other = on_meta(Tied)
    initialize_deferred(other, all_names(other), CPU, seed=4)
    assert not torch.equal(other.body.weight, whole.body.weight)


@pytest.mark.parametrize("names", [["first", "second"], ["second"]])
def test_one_parameter_of_a_module_draws_what_it_draws_in_the_whole(names: list[str]) -> None:
    whole, part = Scaled().to("meta"), Scaled().to("meta")
    first = part.first
    initialize_deferred(whole, ["first", "second"], CPU, seed=1)
    initialize_deferred(part, names, CPU, seed=1)
    assert torch.equal(part.second, whole.second)
    assert part.first is first
    assert first.is_meta is ("first" not in names)
    assert torch.equal(part.frequencies, torch.arange(3.0))


def test_buffers_on_meta_get_values_on_every_rank() -> None:
    model = Tied().to("meta")
    initialize_deferred(model, ["embedding.weight", "body.weight", "body.bias"], CPU, seed=0)
    assert model.norm.weight.is_meta
    assert torch.equal(model.norm.running_var, torch.ones(6))
    assert model.norm.num_batches_tracked.item() == 0


def test_the_model_around_initialises_what_is_inside_and_on_meta() -> None:
    model = on_meta(Root)
    model.inner[2].weight = nn.Parameter(torch.full((2,), 7.0))
    initialize_deferred(model, all_names(model), CPU, seed=0)
    assert abs(model.inner[0].weight.std().item() - 0.01) < 1e-3
    assert model.inner[1].weight.tolist() == [1.0, 1.0]
    assert model.inner[2].weight.tolist() == [7.0, 7.0]


def with_meta_buffer() -> nn.Module:
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(2, device="meta"))
    return module


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2), Uninitialised()),
            r"Uninitialised '1' has weight on the meta .* Define `re",
        ),
        (lambda: nn.ModuleDict({"a": Forgetful()}), "initialisation of Forgetful 'a' leaves bias without values"),
        (lambda: Refining().to("meta"), r"of Refining leaves first without values\. Fill them in place"),
        (with_meta_buffer, "Module has mask on the meta device"),
    ],
)
def test_what_gets_no_values_is_named(build: Callable[[], nn.Module], message: str) -> None:
    model = on_meta(build)
    with pytest.raises(ValueError, match=message):
        initialize_deferred(model, all_names(model), CPU, seed=0)


def test_what_other_ranks_hold_needs_no_initialiser() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Uninitialised()))
    initialize_deferred(model, ["0.weight"], CPU, seed=0)
    assert model[1].weight.is_meta


@pytest.mark.parametrize("build", [gpt2, llama])
def test_models_of_transformers(build: Callable[[], nn.Module]) -> None:
    model, expected = on_meta(build), build()
    assert all(parameter.is_meta for parameter in model.parameters())
    initialize_deferred(model, all_names(model), CPU, seed=0)
    for (name, parameter), reference in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert close(parameter, reference), name
    with torch.no_grad():
        logits = model(input_ids=torch.arange(8).view(1, 8)).logits
    assert bool(logits.isfinite().all())


def close(left: Tensor, right: Tensor) -> bool:
    """Of one distribution, roughly."""
    spread = right.std().item()
    return abs(left.std().item() - spread) <= 0.2 * spread and abs((left.mean() - right.mean()).item()) < 0.02


def test_loaded_values_have_memory_of_their_own() -> None:
    """A state may have one tensor under two names, and the user may hold it."""
    module = nn.ModuleDict({"a": nn.Linear(2, 2, device="meta"), "b": nn.Linear(2, 2, device="meta")})
    loaded = torch.ones(2, 2)
    before: Any = SimpleNamespace(
        setup=SimpleNamespace(module=module, device=CPU), weights={"a.weight": loaded, "b.weight": loaded}
    )
    first, second = (_first_values(before, 0, f"{name}.weight") for name in "ab")
    first.zero_()
    assert torch.equal(second, loaded)
    assert torch.equal(loaded, torch.ones(2, 2))
