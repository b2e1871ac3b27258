"""Optimizers that step shares of parameters as plain tensors, against the same on ``DTensor`` objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer

from lightning_smddp.sharding.optimizer_shards import LocalSteps
from tests.ranks import run_ranks

# Without state, with one that begins filled, with numbers of steps, with more than one; each of torch's ways.
SOME: list[tuple[type[Optimizer], dict[str, Any]]] = [
    *((kind, {}) for kind in (SGD, Adagrad, NAdam)),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (AdamW, {"amsgrad": True}),
    (AdamW, {"fused": True}),
    (AdamW, {"foreach": True}),
]


def make(kind: type[Optimizer], options: dict[str, Any], sharded: bool = True) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1), nn.Linear(1, 3))  # one row is on one rank alone
    model[2].requires_grad_(False)
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": list(model[1:].parameters()), "lr": 0.2}]
    return model, kind(groups, **options)


def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 5)) - step).square().mean()
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()
    return [whole(parameter).detach() for parameter in model.parameters()]


def whole(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    return parameter


def flat_state(optimizer: Optimizer) -> dict[tuple[int, str], Any]:
    state = optimizer.state_dict()["state"]
    return {(number, name): value for number, values in state.items() for name, value in values.items()}


def compare(kind: type[Optimizer], options: dict[str, Any]) -> None:
    model, optimizer = make(kind, options)
    expected = train(model, optimizer)
    other, stepped = make(kind, options)
    steps = LocalSteps(stepped)
    kinds: list[bool] = []
    stepped.register_step_post_hook(lambda optimizer, *_: kinds.append(seen(optimizer)))
    for found, parameter in zip(train(other, stepped), expected, strict=True):
        assert torch.equal(found, parameter), (kind, options)
    states, known = flat_state(stepped), flat_state(optimizer)
    assert states.keys() == known.keys()
    for key, value in states.items():
        assert type(value) is type(known[key]), (kind, key)
        if isinstance(value, DTensor):
            assert value.placements == known[key].placements
            assert torch.equal(value.full_tensor(), known[key].full_tensor()), (kind, key)
    steps.close()
    assert kinds == [True] * 4  # behind a step they are what they were


def seen(optimizer: Optimizer) -> bool:
    return all(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


def compare_all(cases: list[tuple[type[Optimizer], dict[str, Any]]]) -> None:
    for kind, options in cases:
        compare(kind, options)


@pytest.mark.slow
def test_the_same_bits_as_with_dtensors() -> None:
    run_ranks(compare_all, 2, SOME)


def fail_in_a_step() -> None:
    model, optimizer = make(AdamW, {})
    steps = LocalSteps(optimizer)
    train(model, optimizer)
    before = flat_state(optimizer)
    optimizer.param_groups[1]["betas"] = None
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(TypeError):
        optimizer.step()
    steps.restore()
    assert seen(optimizer)
    assert flat_state(optimizer).keys() == before.keys()


def test_groups_and_states_are_there_again_after_an_error() -> None:
    run_ranks(fail_in_a_step, 2)


def shares_in_a_step(kind: type[Optimizer]) -> bool:
    _, optimizer = make(kind, {})
    steps = LocalSteps(optimizer)
    optimizer.register_step_pre_hook(lambda optimizer, *_: shares.append(not seen(optimizer)))
    shares: list[bool] = []
    optimizer.step()
    steps.stand_next_to_step()
    optimizer.step()
    return shares == [True, False]


def test_shares_are_plain_tensors_in_a_step() -> None:
    assert run_ranks(shares_in_a_step, 2, AdamW) == [True] * 2
