from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp._compat.torch import without_torch_function
from lightning_smddp.pipeline.state.meta_parameters import release
from lightning_smddp.pipeline.state.state_dict import broadcast_initial, full_state_dict, load_full_state_dict, unshard
from lightning_smddp.pipeline.view.view import GlobalView
from tests.communication.errors import message_of
from tests.pipeline.models import OWNERSHIP, Tied, assert_same, tied
from tests.ranks import run_in_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Views and their tensors know each other, and the group: it is closed when they are collected."""
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
    state = full_state_dict(GlobalView(model, OWNERSHIP, group, CPU))
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
    load_full_state_dict(model, other.state_dict())
    assert model.note == "loaded"
    state = full_state_dict(GlobalView(model, OWNERSHIP, group, CPU))
    assert_same(state, other.state_dict() if group.rank() == 0 else {})


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
    unshard(GlobalView(model, OWNERSHIP, group, CPU))
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert model.favourites[1] is model.body.weight
    for parameter, reference in zip(model.parameters(), trained().parameters(), strict=True):
        assert_same(parameter.detach(), reference.detach() + 1)
    model(torch.arange(5)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    release(model, OWNERSHIP, group.rank())  # and once more
    unshard(GlobalView(model, OWNERSHIP, group, CPU))


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
