"""A backward in two parts gives what a whole one gives, in the order that zero-bubble schedules need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed.pipelining  # sets an environment variable when first imported, not in a test
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_smddp.pipeline.runtime.split_backward import Roots, SplitBackward, backward

Outputs = tuple[Tensor, ...]


class Two(nn.Module):
    """Two layers and two parameters, for any function of them."""

    def __init__(self, function: Callable[..., Outputs], gradients: Sequence[bool] = (True,)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.v, self.w = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2, 4))
        self.function = function
        self.inputs = [torch.randn(2, 4, requires_grad=gradient) for gradient in gradients]

    def roots(self) -> Roots:
        outputs = self.function(self, *self.inputs)
        torch.manual_seed(1)
        return [(get_gradient_edge(out), torch.randn_like(out)) for out in outputs if out.requires_grad]

    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in self.inputs if leaf.requires_grad]


def with_hook(net: Two, x: Tensor) -> Outputs:
    hidden = net.b(x)
    hidden.register_hook(lambda gradient: gradient * 3)
    return (net.a(torch.tanh(hidden)),)


CASES: dict[str, tuple[Callable[..., Outputs], tuple[bool, ...]]] = {
    "chain": (lambda net, x: (net.b(torch.tanh(net.a(x))),), (True,)),
    "layer used twice": (lambda net, x: (net.a(torch.tanh(net.b(torch.tanh(net.a(x))))),), (True,)),
    "parameter also on a way of its own": (lambda net, x: (x * net.w.exp(), net.w.exp()), (True,)),
    "parameter on a way of its own only": (lambda net, x: (x * net.w, net.v * 3), (True,)),
    "parameter as an output": (lambda net, x: (x * net.v, net.v), (True,)),
    "input passed on, twice": (lambda net, x: (net.a(x), x, x), (True,)),
    "view": (lambda net, x: (net.a(x).view(8),), (True,)),
    "parts of one tensor": (lambda net, x: net.a(x).chunk(2, dim=1), (True,)),
    "no input needs a gradient": (lambda net, x: (net.a(x), net.b(x)), (False,)),
    "input that does not matter": (lambda net, x, y: (net.a(x),), (True, True)),
    "no input matters": (lambda net, x: (net.v * 2,), (True,)),
    "some inputs need none": (lambda net, x, y: (net.a(x) * y,), (True, False)),
    "no output needs a gradient": (lambda net, x: (x.detach(),), (True,)),
    "hook on an activation": (with_hook, (True,)),
    "checkpoint": (lambda net, x: (checkpoint(lambda y: net.a(net.b(y)), x, use_reentrant=False),), (True,)),
    "attention": (lambda net, x: nn.functional.multi_head_attention_forward(
        x, x, x, 4, 2, net.a.weight.repeat(3, 1), net.a.bias.repeat(3), None, None, False, 0.0, net.b.weight, net.b.bias
    )[:1], (True,)),
}  # fmt: skip


def gradients(net: Two) -> list[Tensor | None]:
    return [parameter.grad for parameter in net.parameters()]


def assert_same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_two_parts_equal_the_whole(case: str, autocast: bool) -> None:
    whole, split = Two(*CASES[case]), Two(*CASES[case])
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        roots_of_whole, roots_of_split = whole.roots(), split.roots()
    wanted = backward(roots_of_whole, whole.leaves())
    parts = SplitBackward(roots_of_split, split.leaves())
    assert_same(parts.inputs(), wanted)
    assert gradients(split) == [None] * 6
    parts.weights()
    assert_same(gradients(split), gradients(whole))
    assert all(leaf.grad is None for leaf in (*whole.leaves(), *split.leaves()))


def test_a_way_that_parameters_share_is_gone_through_once() -> None:
    net, calls = Two(lambda net, x: (x,)), []
    (x,) = net.leaves()
    shared = torch.tanh(net.v * 2)
    out = x
    for weight in (net.a.bias, net.b.bias):
        way = shared * weight
        way.register_hook(calls.append)
        out = torch.tanh(out * way)
    parts = SplitBackward([(get_gradient_edge(out), torch.ones_like(out))], [x])
    parts.inputs()
    assert calls == []
    parts.weights()
    assert len(calls) == 2
