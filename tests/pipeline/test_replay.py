"""Stages of all kinds of steps compute what the whole step computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.pipeline import example_modules_that_change  # noqa: F401  more members
from tests.pipeline.example_modules import EXAMPLES, D
from tests.pipeline.stage_emulation import Step, assert_every_cut, assert_transparent, assert_transparent_apart


class Root(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def root_of(name: str) -> Root:
    torch.manual_seed(0)
    return Root(EXAMPLES[name]())


def step_of(root: nn.Module) -> Step:
    batch = torch.linspace(-2, 2, 4 * D).reshape(4, D).sin() * 2
    return lambda: root.net(batch.clone())


ONE_STAGE = ("sequential", "changed_buffers")  # one unit; buffers that are used from the first unit to the last
LARGEST = ("attention", "resnet", "shapes_and_places")  # each with the cuts of ten others


def children(name: str) -> bool:
    return name != "net"


def leaf_modules(name: str) -> bool:
    return name.count(".") > 1 or name in ("net.a", "net.b", "net.c", "net.d")


@pytest.mark.parametrize("is_small", [children, leaf_modules])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in LARGEST else n for n in EXAMPLES if n not in ONE_STAGE],
)
def test_every_cut_is_exact(name: str, is_small: Callable[[str], bool]) -> None:
    assert_every_cut(root_of(name), step_of, is_small)


@pytest.mark.slow
@pytest.mark.parametrize("is_small", [pytest.param(children, marks=pytest.mark.exhaustive), leaf_modules])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ONE_STAGE])
def test_four_stages(name: str, is_small: Callable[[str], bool]) -> None:
    assert_transparent(root_of(name), step_of, is_small, 4)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ONE_STAGE])
def test_stages_need_no_parameters_but_their_own(name: str) -> None:
    assert_transparent_apart(root_of(name), step_of, children, 2)
