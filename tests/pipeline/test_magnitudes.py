"""Which numbers of a step are new: by sign and order of magnitude, each place and turn of a loop for itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lightning_smddp.pipeline.partition.magnitudes import KeptNumbers, KnownMagnitudes, Magnitudes, is_number, magnitude


def turns(*values: float) -> Magnitudes:
    return {"here": [(magnitude(value),) for value in values]}


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [(0.5, 0.9, True), (0, 0.0, True), (1, 9.9, True), (1, 10, False), (0, 1e-9, False), (1, -1, False),
     (float("inf"), float("nan"), True), (np.float32(2), 2, True), (10**400, 10**400 + 1, True)],
)  # fmt: skip
def test_magnitudes(one: float, other: float, alike: bool) -> None:
    assert (magnitude(one) == magnitude(other)) == alike


def test_flags_are_no_numbers() -> None:
    assert [is_number(value) for value in (1, 1.0, np.int64(1), True, None, "1")] == [True] * 3 + [False] * 3


def test_a_place_is_told_by_its_turns_but_not_by_how_many_there_are() -> None:
    known = KnownMagnitudes()
    known.accept([turns(1, 0)])
    assert not known.is_new(turns(1, 0))
    assert known.is_new(turns(1, 1))
    assert not known.is_new(turns(1, 0, 0, 1))
    assert known.is_new(turns(1, 0, 10))
    assert known.is_new({"elsewhere": [(magnitude(1),)]})


def test_what_never_comes_to_rest_is_new_only_so_often() -> None:
    known = KnownMagnitudes()
    known.accept([turns(1)])
    found = []
    for exponent in range(1, 20):
        found.append(known.is_new(turns(10**exponent)))
        known.accept([turns(10**exponent)])
    assert found == [True] * 8 + [False] * 11
    assert known.is_new(turns(0))


def test_numbers_that_modules_keep() -> None:
    module = nn.Sequential(nn.LayerNorm(2), nn.Dropout(0.1))
    module.register_buffer("weight", torch.zeros(()))
    kept = KeptNumbers(module.modules())
    assert not kept.is_new()
    module[1].p = 0.2
    assert not kept.is_new()
    module[1].p = 0.0
    assert kept.is_new()
    kept.accept()
    assert not kept.is_new()
    module.get_buffer("weight").fill_(0.3)
    assert kept.is_new()
    assert kept.is_new()  # until it is accepted
    kept.accept()
    module.weight = torch.tensor(4.0)
    assert kept.is_new()
    kept.accept()
    module.weight = torch.tensor(5.0)
    assert not kept.is_new()
