from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from lightning_smddp.pipeline.mesh import Ownership, held_parameters
from lightning_smddp.pipeline.partition.assignment import follow, parameter_stages_of
from lightning_smddp.pipeline.state.meta_parameters import release
from tests.pipeline.models import OWNERSHIP, tied
from tests.pipeline.stage_emulation import program_of


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_who_holds_and_who_speaks() -> None:
    assert OWNERSHIP.held_by(0) == ["embedding.weight", "body.weight", "body.bias"]
    assert OWNERSHIP.held_by(1) == ["embedding.weight", "norm.weight", "norm.bias", "head.bias"]
    assert OWNERSHIP.owner("embedding.weight") == 1
    assert OWNERSHIP.owner("norm.running_mean") == 1
    assert OWNERSHIP.is_mine("embedding.weight", 0)
    assert not OWNERSHIP.is_mine("head.bias", 0)
    assert OWNERSHIP.shared() == {(0, 1): ["embedding.weight"]}
    assert list(held_parameters(tied(), OWNERSHIP, 0)) == OWNERSHIP.held_by(0)


@pytest.mark.parametrize(
    ("unused", "stage"),
    [
        ("copy.0.weight copy.1.weight", (0, 1)),  # beside its twin
        ("other.1.weight other.2.weight", (1, 1)),  # of `net` only one has such a name
        ("net.2.weight", (1,)),  # a layer that was left out: behind `net.1`
        ("net.1.own.0.weight net.1.own.1.weight", (1, 1)),  # of a layer: not beside a part of `net` with such names
        ("extra", (1,)),
        ("net.0.extra", (0,)),
    ],
)
def test_what_the_step_does_not_use_is_beside_its_twin_or_its_neighbours(unused: str, stage: tuple[int, ...]) -> None:
    names = ["net.0.weight", "net.1.weight", *unused.split(), "head.weight"]
    nodes = [SimpleNamespace(parameters=(name,)) for name in ("net.0.weight", "net.1.weight", "head.weight")]
    stages: Any = [SimpleNamespace(stage=0, begin=0, end=1), SimpleNamespace(stage=1, begin=1, end=3)]
    graph: Any = SimpleNamespace(nodes=nodes)
    placed = parameter_stages_of(graph, stages, names)
    assert list(placed) == names
    assert tuple(found for name in unused.split() for found in placed[name]) == stage


def test_a_layer_that_was_left_out_is_no_twin_of_one_in_another_stack() -> None:
    """As layer drop leaves out layers of an encoder, and the decoder's have the same names."""
    stage_of = {"encoder.0.fc.weight": 0, "encoder.2.fc.weight": 0, "decoder.0.fc.weight": 1, "decoder.1.fc.weight": 1}
    graph: Any = SimpleNamespace(nodes=[SimpleNamespace(parameters=(name,)) for name in stage_of])
    stages: Any = [SimpleNamespace(stage=0, begin=0, end=2), SimpleNamespace(stage=1, begin=2, end=4)]
    placed = parameter_stages_of(graph, stages, [*stage_of, "encoder.1.fc.weight"])
    assert placed["encoder.1.fc.weight"] == (0,)


@pytest.mark.parametrize(("owner", "begin"), [(0, "2"), (1, "1")])
def test_another_step_changes_buffers_where_they_are_owned(owner: int, begin: str) -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    graph = program_of(root, lambda: root(torch.ones(4, 2)).sum(), bool)
    parameters = {"0.weight": (0,), "0.bias": (0,), "2.weight": (1,), "2.bias": (1,)}
    ownership = Ownership(parameters, {name: owner for name, _ in root.named_buffers()}, 2)
    _, second = follow(graph, parameters, ownership, [0, 1])
    assert graph.nodes[second.begin].module == begin


def test_a_module_that_changed_after_it_was_divided_is_refused() -> None:
    model = tied()
    model.late = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"Tied's parameters changed .*\['late.bias', 'late.weight'\] came or went"):
        release(model, OWNERSHIP, 0)


def test_release_keeps_objects_and_drops_values() -> None:
    model = tied()
    model.head.bias.requires_grad_(False)
    model.body.weight.note = "kept"
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    buffer = model.norm.running_mean
    release(model, OWNERSHIP, 1)
    release(model, OWNERSHIP, 1)  # again: nothing changes
    assert dict(model.named_parameters()) == parameters
    assert all(a is b for a, b in zip(model.parameters(), parameters.values(), strict=True))
    assert model.head.weight is model.embedding.weight
    assert model.favourites[1] is model.body.weight
    assert optimizer.param_groups[0]["params"][1] is model.body.weight
    for name, parameter in parameters.items():
        mine = OWNERSHIP.is_mine(name, 1)
        assert parameter.is_meta is not mine
        assert (parameter.grad is None) is not mine
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad is (name != "head.bias")
    assert model.body.weight.shape == (6, 6)
    assert model.body.weight.note == "kept"
    assert model.norm.running_mean is buffer
    assert not buffer.is_meta


@pytest.mark.parametrize("holder", ["weak reference", "fake tensors", "autograd graph", "hooks"])
def test_release_whatever_else_knows_the_parameter(holder: str) -> None:
    model = tied()
    kept: list[object] = []
    if holder == "weak reference":
        kept.append(weakref.ref(model.body.weight))
    elif holder == "fake tensors":
        kept += [mode := FakeTensorMode(), mode.from_tensor(model.body.weight)]
    elif holder == "hooks":
        model.body.weight.register_hook(lambda gradient: gradient)
    else:
        kept.append((model.body.weight * model.body.weight).sum())
    weight = model.body.weight
    release(model, OWNERSHIP, 1)
    assert model.body.weight is weight
    assert weight.is_meta


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_memory_is_really_given_back() -> None:
    model = nn.Sequential(nn.Linear(4000, 4000, bias=False), nn.Linear(4000, 4000, bias=False))  # 61 MiB each
    ownership = Ownership({"0.weight": (0,), "1.weight": (1,)}, {}, 2)
    model(torch.zeros(1, 4000)).sum().backward()  # gradients: as much again
    gc.collect()
    before = resident_mib()
    release(model, ownership, 0)
    assert before - resident_mib() > 110
