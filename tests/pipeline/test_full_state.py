"""States of the whole module and of its optimizer, from the parts that ranks hold and back."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

from lightning_smddp._compat.torch import without_torch_function
from lightning_smddp.communication.objects import broadcast
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.state.meta_parameters import release
from lightning_smddp.pipeline.state.optimizer import OptimizerPartition, OwnSteps
from lightning_smddp.pipeline.state.state_dict import broadcast_initial, full_state_dict, load_full_state_dict, unshard
from lightning_smddp.pipeline.view.view import GlobalView
from tests.communication.errors import message_of
from tests.pipeline.models import OWNERSHIP, Tied, assert_same, tied, train_step
from tests.ranks import run_in_threads

CPU = torch.device("cpu")
ONE_AT_A_TIME = threading.Lock()  # of ranks, which are threads here: filters of warnings are of all threads


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Views and their tensors know each other, and the group: it is closed when they are collected."""
    gc.freeze()  # what is there already is not looked through each time
    yield
    gc.collect()


def trained() -> Tied:
    """Whole, with buffers that training has changed."""
    model = tied()
    model.note = "trained"
    model.norm.running_mean += 1
    model.norm.num_batches_tracked += 5
    return model


def divided(group: dist.ProcessGroup) -> Tied:
    """This rank's part of :func:`trained`: what others own is wrong or absent."""
    model = trained()
    for name, buffer in model.named_buffers():
        if OWNERSHIP.owner(name) != group.rank():
            buffer.zero_()
    release(model, OWNERSHIP, group.rank())
    return model


def test_state_is_that_of_the_whole_model_and_loads_into_the_parts() -> None:
    run_in_threads(compare_state, 2)


def compare_state(group: dist.ProcessGroup) -> None:
    model, other, expected = divided(group), tied(seed=1), trained().state_dict()
    state = full_state_dict(GlobalView(model, OWNERSHIP, group, CPU, Channel(group, CPU)))
    if group.rank() != 0:
        assert state == {}
    else:
        assert_same(state, expected)
        assert state._metadata == expected._metadata
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert [parameter.is_meta for parameter in model.parameters()] == [
        not OWNERSHIP.is_mine(name, group.rank()) for name, _ in model.named_parameters()
    ]
    assert bool((model.norm.running_mean == 0).all()) is (group.rank() == 0)  # its own is as it was
    other.note = "loaded"
    with ONE_AT_A_TIME:
        load_full_state_dict(model, other.state_dict())
    assert model.note == "loaded"
    view = GlobalView(model, OWNERSHIP, group, CPU, Channel(group, CPU))
    assert_same(full_state_dict(view), other.state_dict() if group.rank() == 0 else {})
    model.late = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"\['late.weight', 'late.bias'\] came after"):
        full_state_dict(view)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_state_is_refused_as_in_the_whole_model(rank: int) -> None:
    state = tied().state_dict()
    state["unknown"] = torch.zeros(1)
    del state["body.weight"]
    messages = []
    for model in (tied(), tied()):
        if messages:
            release(model, OWNERSHIP, rank)
        with pytest.raises(RuntimeError) as info:
            load_full_state_dict(model, state)
        messages.append(str(info.value))
    assert messages[0] == messages[1]
    assert load_full_state_dict(model, state, strict=False) == tied().load_state_dict(state, strict=False)
    state["head.bias"] = torch.zeros(3)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for head.bias: copying a param with shape torch.Size\(\[3\]"
    ):
        load_full_state_dict(model, state, strict=False)


def test_the_whole_model_comes_back_as_the_same_objects() -> None:
    run_in_threads(come_back, 2)


def come_back(group: dist.ProcessGroup) -> None:
    model = trained()
    before = list(model.parameters())
    release(model, OWNERSHIP, group.rank())
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.add_(1)
    unshard(GlobalView(model, OWNERSHIP, group, CPU, Channel(group, CPU)))
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert model.favourites[1] is model.body.weight
    for parameter, reference in zip(model.parameters(), trained().parameters(), strict=True):
        assert_same(parameter.detach(), reference.detach() + 1)
    model(torch.arange(5)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    release(model, OWNERSHIP, group.rank())  # and once more
    unshard(GlobalView(model, OWNERSHIP, group, CPU, Channel(group, CPU)))


def test_every_rank_starts_from_the_first() -> None:
    states = run_in_threads(start, 3, lambda rank: tied(seed=rank))
    for state in states:
        assert_same(state, tied(seed=0).state_dict())


def start(group: dist.ProcessGroup, build: Callable[[int], Tied]) -> dict[str, Any]:
    model = build(group.rank())
    model.norm.running_mean += group.rank()
    broadcast_initial(model, group)
    with without_torch_function():
        return model.state_dict()


def test_different_models_are_refused_on_every_rank() -> None:
    def build(rank: int) -> Tied:
        model = tied()
        model.body = nn.Linear(6, 6 + rank)
        return model

    for message in run_in_threads(refuse, 2, build):
        assert "models differ between ranks. The first difference: rank 0" in message
        assert "parameter body.weight: shape (6, 6)" in message


def refuse(group: dist.ProcessGroup, build: Callable[[int], Tied]) -> str:
    return message_of(ValueError, lambda: broadcast_initial(build(group.rank()), group))


# ---- optimizers ----

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
