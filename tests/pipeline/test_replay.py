"""Stages of all kinds of steps compute what the whole step computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.example_modules import EXAMPLES, children, example, leaf_modules, step_of
from tests.pipeline.stage_emulation import (
    assert_transparent,
    assert_transparent_apart,
    each_cut,
    gradients,
    plainly,
    program_of,
    run_stages,
    stages_on,
)


@pytest.mark.parametrize("is_small", [children, leaf_modules])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_cut_is_exact(name: str, is_small: Callable[[str], bool]) -> None:
    assert_transparent(example(name), step_of, is_small, each_cut)


@pytest.mark.parametrize("name", EXAMPLES)
def test_stages_need_no_parameters_but_their_own(name: str) -> None:
    assert_transparent_apart(example(name), step_of, children, 2)


# ---- a later step on the same graph ----


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda net: net[3].register_forward_hook(lambda module, args, output: output * 2),
    "forward": lambda net: setattr(net[2], "forward", lambda x: torch.tanh(nn.Linear.forward(net[2], x))),
    "module": lambda net: setattr(net, "2", nn.Linear(4, 4)),
    "class": lambda net: setattr(net[2], "__class__", Tripled),
    "eval": lambda net: net[1].eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_the_last_step_is_followed(change: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    graph = program_of(net, lambda: net(x).sum(), lambda name: True)
    in_two = [stages_on(net, graph, cuts, lambda: net(x).sum()) for cuts in each_cut(graph)]
    assert len(in_two) == 3
    run_stages(graph, in_two[0])
    before = gradients(net)
    CHANGES[change](net)
    net.zero_grad()
    with plainly(net):
        net(x).sum().backward()
    expected = gradients(net)
    assert not torch.allclose(expected["0.weight"], before["0.weight"])
    for stages in in_two:
        net.zero_grad()
        run_stages(graph, stages)
        torch.testing.assert_close(gradients(net), expected)
