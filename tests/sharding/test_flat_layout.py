"""Parameters in a row, cut into shares."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lightning_smddp.sharding.flat_parameters import FlatParameters, in_memory_order, lay_out, movable


def of_sizes(*sizes):
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def covered(layout, shares):
    """(parameter, element) -> share; each element of each parameter once."""
    found = {}
    for share in range(shares):
        for slot, low, high in layout.pieces_of_share(share):
            for element in range(low, high):
                assert (slot.parameter, element) not in found
                found[slot.parameter, element] = share
    return found


def test_equal_shares_cover_each_element_once_and_are_equally_long():
    members = of_sizes(100, 7, 1, 333)
    for shares in (1, 2, 3, 5):
        (layout,) = lay_out(members, shares, splits=True)
        assert len({high - low for low, high in itertools.pairwise(layout.bounds)}) == 1
        assert len(covered(layout, shares)) == 441
        assert all(slot.start % 16 == 0 for slot in layout.slots)


def test_whole_parameters_are_in_one_share_each_and_balanced():
    (layout,) = lay_out(of_sizes(100, 60, 50, 10), 2, splits=False)
    loads = [sum(high - low for _, low, high in layout.pieces_of_share(share)) for share in (0, 1)]
    assert sorted(loads) == [110, 110]
    assert len(set(covered(layout, 2).values())) == 2
    for share in (0, 1):
        for slot, low, high in layout.pieces_of_share(share):
            assert (low, high) == (0, slot.parameter.numel())


def test_types_and_frozen_parameters_have_layouts_of_their_own():
    members = [*of_sizes(10, 20), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]
    members[0].requires_grad = False
    layouts = lay_out(members, 2, splits=True)
    assert [[id(slot.parameter) for slot in layout.slots] for layout in layouts] == [[id(member)] for member in members]


def test_views_of_one_memory_and_empty_parameters_stay():
    base = torch.zeros(10)
    views = [nn.Parameter(base[:5]), nn.Parameter(base[5:])]
    empty, expanded, plain = of_sizes(0)[0], nn.Parameter(torch.zeros(1).expand(5)), of_sizes(3)[0]
    (found,) = movable([*views, empty, expanded, plain])
    assert found is plain


def test_memory_order_is_that_of_the_parameter():
    weight = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    gradient = torch.arange(24.0).reshape(1, 2, 3, 4)
    for given in (gradient, gradient.to_sparse()):
        assert torch.equal(in_memory_order(given, weight), in_memory_order(weight, weight))
    same = torch.empty_like(weight)
    in_memory_order(same, weight).fill_(3.0)
    assert torch.equal(same, torch.full((1, 2, 3, 4), 3.0))


@pytest.mark.parametrize("other", [torch.zeros(1), torch.zeros(4, dtype=torch.float64)], ids=["shape", "type"])
def test_a_parameter_of_another_shape_or_type_is_an_error(other):
    (parameter,) = of_sizes(4)
    flat = FlatParameters(lay_out([parameter], 1, splits=True), 0, None)
    parameter.data = torch.ones(4)
    flat.begin_step()
    assert parameter.tolist() == [1.0] * 4
    parameter.data = other
    with pytest.raises(ValueError, match="with shard='optimizer' both stay as they are"):
        flat.begin_step()
