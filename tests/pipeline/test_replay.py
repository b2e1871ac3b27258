"""Stages of all kinds of steps compute what the whole step computes; what a replay refuses, and what it leaves."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.runtime.remote_tensor import ReplayError
from lightning_smddp.pipeline.runtime.stage_program import Shapes
from lightning_smddp.pipeline.runtime.step_run import run_stage
from tests.pipeline.example_modules import EXAMPLES, Cube, Layer, Net, batch, children, example, leaf_modules, step_of
from tests.pipeline.stage_emulation import (
    assert_transparent,
    assert_transparent_apart,
    each_cut,
    gradients,
    plainly,
    program_of,
    run_stages,
    stages_on,
    wrappers_of,
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


# ---- what is refused, and what is left behind ----


class Case:
    """A net in two stages, the second beginning with module ``begin`` (or an item's name)."""

    def __init__(
        self, body: Callable[..., Any], begin: str = "net.c", checkpointing: bool = False, **more: Any
    ) -> None:
        torch.manual_seed(0)
        self.net = Net(body, **more)
        self.root = nn.ModuleDict({"net": self.net})
        self.x = batch()
        self.graph: StepGraph = program_of(self.root, self.step, children)
        cut = next(item.index for item in self.graph.nodes if item.name.startswith(begin))
        self.stages = stages_on(self.root, self.graph, [cut], self.step, checkpointing)

    def step(self) -> Any:
        return self.net(self.x)

    def run(self, shapes: Shapes | None = None, record: Shapes | None = None) -> Any:
        return run_stages(self.graph, self.stages, shapes, record)


def other_operation(s: Net, x: Tensor, later: bool) -> Tensor:
    h = s.a(x)
    return s.d(s.c(s.b(h.sin() if later else h.cos()))).mean()


def other_module(s: Net, x: Tensor, later: bool) -> Tensor:
    return s.d((s.d if later else s.b)(s.a(x)) + s.c(x)).mean()


def early_return(s: Net, x: Tensor, later: bool) -> Tensor | None:
    h = s.a(x)
    return None if later else s.d(s.c(s.b(h))).mean()


def later_use(s: Net, x: Tensor, later: bool) -> Tensor:
    h = s.a(x)
    loss = s.d(s.c(s.b(h))).mean()
    return loss + h.pow(2).mean() if later else loss


@pytest.mark.parametrize(
    ("body", "begin", "message"),
    [
        (later_use, "net.c", r"pow at .*test_replay.py:\d+ uses a tensor of another stage, as the step did not"),
        (other_operation, "net.c", r"sin at .*test_replay.py:\d+ where cos at test_replay.py:\d+ was expected"),
        (other_module, "net.c", "module 'net.d' where net.b was expected"),
        (early_return, "net.c", "returned before it came to '?net.b"),
    ],
)
def test_another_path_is_refused_with_both_places(body: Callable[..., Any], begin: str, message: str) -> None:
    flag: list[int] = []
    case = Case(lambda s, x: body(s, x, bool(flag)), begin)
    flag.append(1)
    with pytest.raises(ReplayError, match=message):
        case.run()


def test_what_is_kept_from_another_step() -> None:
    kept: list[Tensor] = []

    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x)
        y = s.c(s.b(h))
        y = y + (kept[-1] if kept else y)
        kept[:] = [h]
        return s.d(y).mean()

    case = Case(body)
    first, second = (stage.replay for stage in case.stages)
    shapes = Shapes.of(case.graph)
    with wrappers_of(case.root).active([case.graph]):
        received, _ = run_stage(first, case.step, (), shapes)
        run_stage(second, case.step, received, shapes)
        with pytest.raises(ReplayError, match=r"test_replay.py:\d+ a tensor of another stage.*earlier step"):
            run_stage(second, case.step, received, shapes)


def test_what_is_in_a_buffer_is_sent_as_it_was() -> None:
    """The next micro-batch writes there, maybe before the message has gone."""

    def layer(s: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        y = s.linear(x)
        s.last.copy_(y.detach())
        return y, s.last.detach()

    def body(s: Net, x: Tensor) -> Tensor:
        h, last = s.inner(s.a(x))
        return (s.d(s.c(s.b(h))) * last).mean()

    case = Case(body, inner=Layer(layer, last=torch.zeros(4, 6)))
    program, shapes = case.stages[0].replay, Shapes.of(case.graph)
    with wrappers_of(case.root).active([case.graph]):
        sent, _ = run_stage(program, case.step, (), shapes)
        before = [tensor.clone() for tensor in sent]
        case.x = case.x * 2
        run_stage(program, case.step, (), shapes)
    assert len(sent) == 2
    assert all(map(torch.equal, sent, before))


def test_constants_of_another_signature() -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        h, rows, kind, size = s.inner(s.a(x))
        assert kind is Tensor
        assert size == h.shape
        return s.d(s.c(s.b(h)) + torch.arange(rows)[:, None]).mean()

    case = Case(body, inner=Layer(lambda s, x: (s.linear(x), len(x), Tensor, x.shape)))
    case.x = batch(7)
    found = Shapes()
    case.run(Shapes(), record=found)
    case.root.zero_grad()
    again = pickle.loads(pickle.dumps(found))  # as other ranks get it
    assert again.values == found.values
    torch.testing.assert_close(case.run(again), case.step())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_leave_no_patch(error: type[BaseException]) -> None:
    flag: list[int] = []
    apply = torch.autograd.Function.__dict__["apply"]

    def body(s: Net, x: Tensor) -> Tensor:
        h = Cube.apply(s.a(x), 1.0)[0]
        if flag:
            raise error
        return s.d(s.c(s.b(h))).mean()

    case = Case(body)
    flag.append(1)
    with pytest.raises(error):
        case.run()
    flag.clear()
    assert torch._C._len_torch_function_stack() == 0
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert not any("forward" in module.__dict__ for module in case.root.modules())
    torch.testing.assert_close(case.run(), case.step())
