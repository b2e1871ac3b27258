"""Which modules are gathered by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_smddp.sharding.units import find_units


class Leaf(nn.Module):
    """Two layers of its own, which are no units: how it uses them is its own affair."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.two(self.one(x)))


def test_elements_of_containers_are_units():
    model = nn.Module()
    model.embed = nn.Embedding(8, 4)
    model.blocks = nn.ModuleList(Leaf() for _ in range(3))
    model.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert find_units(model).names == ["blocks.0", "blocks.1", "blocks.2", "head.0", "head.2"]


def test_a_large_element_is_divided_and_a_tiny_one_stays():
    tower = nn.Sequential(*(Leaf(16) for _ in range(4)))
    model = nn.Sequential(tower, nn.Linear(16, 16), nn.LayerNorm(1))
    assert find_units(model).names == ["0.0", "0.1", "0.2", "0.3", "1"]


def test_blocks_in_attributes_are_units_where_containers_have_little():
    model = nn.Module()
    model.net = nn.Module()
    model.net.down1, model.net.down2, model.net.up1 = Leaf(), Leaf(), Leaf(16)
    model.net.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    names = ["net.down1", "net.down2", "net.up1.one", "net.up1.two", "net.head"]
    assert find_units(model).names == names
    model.blocks = nn.ModuleList(Leaf(16) for _ in range(4))
    elements = [f"blocks.{index}" for index in range(4)]
    assert find_units(model).names == ["net.head.0", "net.head.1", *elements]


def test_lists_in_lists_are_looked_into():
    model = nn.ModuleDict({"a": nn.ModuleList([Leaf(), Leaf()]), "b": Leaf()})
    assert find_units(model).names == ["a.0", "a.1", "b"]


def test_what_is_tied_stays_with_the_root():
    model = nn.Module()
    model.embed = nn.Embedding(8, 4)
    model.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model.head[1].weight = model.embed.weight
    assert find_units(model).names == ["head.0"]
    given = find_units(model, wrap=[nn.Linear])
    assert given.names == ["head.0"]
    assert given.notes == ["head.1 stays with the root: head.1.weight is tied to a parameter outside of it"]


def test_a_module_that_is_used_twice_is_one_unit():
    leaf = Leaf()
    assert find_units(nn.Sequential(leaf, nn.ReLU(), leaf, Leaf())).names == ["0", "3"]


def test_units_can_be_given():
    model = nn.Sequential(Leaf(), nn.Sequential(Leaf(), nn.Linear(4, 4)))
    assert find_units(model, wrap=["1.0", Leaf]).names == ["0", "1.0"]
    assert find_units(model, wrap=["Leaf"]).names == ["0", "1.0"]
    assert find_units(model, wrap=lambda name, module: name.endswith(".two")).names == ["0.two", "1.0.two"]
    assert find_units(model, wrap=[]).names == []


def test_wrong_names_are_errors():
    model = nn.Module()
    model.blocks = nn.ModuleList([Leaf(), Leaf()])
    for name in ("block", "blocks"):  # a list, which nobody calls
        with pytest.raises(ValueError, match=rf"wrap=\['{name}'\]: '{name}' is neither .* There are: blocks.0, "):
            find_units(model, wrap=[name])
