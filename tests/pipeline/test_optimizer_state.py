from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

from lightning_smddp.communication.objects import broadcast
from lightning_smddp.pipeline.state.meta_parameters import release
from lightning_smddp.pipeline.state.optimizer import OptimizerPartition, OwnSteps
from tests.pipeline.models import OWNERSHIP, assert_same, tied, train_step
from tests.ranks import run_in_threads

Build = Callable[[nn.Module], Optimizer]


def two_groups(model: nn.Module) -> Optimizer:
    """Weight decay for matrices only, as is usual; the first group of rank 1 is empty but for the tied weight."""
    parameters = dict(model.named_parameters())
    decayed = [p for p in parameters.values() if p.dim() > 1]
    rest = [p for p in parameters.values() if p.dim() < 2]
    return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


class Clipped(SGD):
    """Looks at all parameters, with a gradient or not."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)
        return loss


OPTIMIZERS: dict[str, Build] = {
    "SGD, all clipped": lambda model: Clipped(model.parameters(), lr=0.1),
    "SGD": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: Adagrad(model.parameters(), lr=0.1),  # has states before the first step
    "Adam": lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True),
    "AdamW in groups": two_groups,
    "AdamW by name": lambda model: AdamW(model.named_parameters(), lr=0.01),
    "Adafactor": lambda model: Adafactor(model.parameters(), lr=0.01),
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=0.01, centered=True),
}


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


class Rank:
    """One rank's part of a model in training: gradients and values come from a whole model beside it."""

    def __init__(self, group: dist.ProcessGroup, build: Build) -> None:
        self.group, self.whole, self.model = group, tied(), tied()
        dist.barrier(group=group)  # of what comes now some draws from the generator that the threads have in common
        self.optimizer, self.reference = build(self.model), build(self.whole)
        OwnSteps(self.optimizer)
        release(self.model, OWNERSHIP, group.rank())
        self.partition = OptimizerPartition(self.optimizer, names_of(self.model), OWNERSHIP, group.rank())

    def step(self, seed: int) -> None:
        self.whole.zero_grad()
        train_step(self.whole, seed)
        for part, whole in zip(self.model.parameters(), self.whole.parameters(), strict=True):
            part.grad = None if part.is_meta else whole.grad.clone()
        self.reference.step()
        self.optimizer.step()

    def compare(self) -> dict[str, Any]:
        for part, whole in zip(self.model.parameters(), self.whole.parameters(), strict=True):
            assert part.is_meta or torch.equal(part, whole)
        state = self.partition.full_state_dict(self.group)
        if self.group.rank() == 0:
            assert_same(state, self.reference.state_dict())
        else:
            assert state == {}
        return state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_that_of_the_whole_optimizer_and_back(name: str) -> None:
    run_in_threads(save_and_load, 2, OPTIMIZERS[name])


def save_and_load(group: dist.ProcessGroup, build: Build) -> None:
    rank = Rank(group, build)
    rank.compare()  # before the first step
    mine = {id(p) for p in rank.model.parameters() if not p.is_meta}
    assert {id(p) for p in rank.partition.parameters} == mine
    for seed in range(3):
        rank.step(seed)
    rank.compare()
    assert {id(p) for g in rank.optimizer.param_groups for p in g["params"]} == set(names_of(rank.model))
    assert {id(p) for p in rank.optimizer.state} <= mine
    # the state loads in plain torch, and back into fresh parts, which go on alike
    state = broadcast(rank.partition.full_state_dict(group), group)
    again = Rank(group, build)
    again.whole.load_state_dict(rank.whole.state_dict())
    again.reference.load_state_dict(copy.deepcopy(state))
    for part, whole in zip(again.model.parameters(), rank.model.parameters(), strict=True):
        if not part.is_meta:
            part.data.copy_(whole)
    unchanged = copy.deepcopy(state)
    again.partition.load_full_state_dict(state)
    assert_same(state, unchanged)
    again.compare()
    for seed in range(3, 5):
        again.step(seed)
    again.compare()


def test_a_state_of_another_model_is_refused() -> None:
    model = tied()
    partition = OptimizerPartition(SGD(model.parameters(), lr=0.1), names_of(model), OWNERSHIP, 0)
    other = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        partition.load_full_state_dict(other.state_dict())


def test_a_tensor_that_is_not_the_modules_is_refused() -> None:
    model = tied()
    optimizer = SGD([*model.parameters(), torch.zeros(3, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD has a tensor of shape \(3,\) \(number 6 of its group\)"):
        OptimizerPartition(optimizer, names_of(model), OWNERSHIP, 0)
