"""A stage's run: what users write between modules, inside of them and around them, in two to four stages."""

from __future__ import annotations

import copy
import gc
import math
import random
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_smddp.pipeline import activations
from lightning_smddp.pipeline.activations import Checkpointing
from lightning_smddp.pipeline.capture.boundaries import possible_cuts, reason_not_to_cut
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.runtime.step_run import StageRun
from tests.pipeline.example_modules import Cube, Layer, batch
from tests.pipeline.example_modules import Net as Layers
from tests.pipeline.stage_emulation import (
    assert_transparent,
    assert_transparent_apart,
    each_cut,
    even_cuts,
    in_stages,
    program_of,
    run_stages,
    stages_on,
)

D = 8
X = torch.randn(6, 5, D, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, D, (6, 5), generator=torch.Generator().manual_seed(2))
Between: TypeAlias = Callable[["Net", int, Tensor, Any], Any]
Before: TypeAlias = Callable[["Net", Tensor], Any]


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(D, D), nn.Linear(D, D), p

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.dropout(torch.tanh(self.a(x)), self.p, self.training))


class Net(nn.Module):
    """Blocks, and ``between`` called with (net, i, x, what ``before`` gave) behind block i."""

    def __init__(self, between: Between | None = None, p: float = 0.0, before: Before | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(p) for _ in range(5)])
        self.head = nn.Linear(D, D)
        self.scale = nn.Parameter(torch.ones(D))
        self.between, self.before = between, before

    def forward(self, x: Tensor) -> Tensor:
        state = self.before(self, x) if self.before else None
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.between:
                x = self.between(self, i, x, state)
        return self.head(x)


def is_unit(name: str) -> bool:
    return name != "net"


def loss_of_net(root: nn.Module) -> Tensor:
    return F.cross_entropy(root.net(X.clone()).flatten(0, 1), Y.flatten())


def check(
    net: nn.Module,
    loss: Callable[[nn.Module], Tensor] = loss_of_net,
    stages: tuple[int, ...] = (2, 3, 4),
    checkpointing: Checkpointing = False,
    small: Callable[[str], bool] = is_unit,
) -> StepGraph:
    """Losses and gradients of so many stages are those of a plain step with the same seeds."""
    root = nn.ModuleDict({"net": net})
    graph = assert_transparent(root, lambda root: lambda: loss(root), small, in_stages(*stages), 2e-6, checkpointing)
    assert [len(even_cuts(graph, count)) + 1 for count in stages] == list(stages)
    return graph


def first(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(net.head(x))


def facts(net: Net, i: int, x: Tensor, s: Tensor) -> Tensor:
    """What can be asked of a tensor whose values are elsewhere."""
    text = f"{s} {s.sum():.2f} {s.shape} {s.device} {s.dtype} {len(s)}"
    assert "5" in text
    assert isinstance(s, Tensor)
    assert s is not None
    assert torch.is_tensor(s)
    assert s.type() == "torch.FloatTensor"
    assert s.requires_grad
    assert not s.is_cuda
    assert s.device.type == next(net.parameters()).device.type == net.head.weight.device.type == "cpu"
    positions = torch.arange(D, device=s.device) + s.new_zeros(len(s), 1, 1) + torch.zeros_like(s)
    return (
        x + positions.to(s) + torch.full((s.size(0), 1, 1), 2.0, dtype=s.dtype) + torch.zeros_like(net.head.weight[0])
    )


# ---- operations between modules ----

FORMS: dict[str, Between] = {
    "cat": lambda n, i, x, s: torch.cat([x, s, x], -1)[..., D // 2 : D // 2 + D],
    "free_by_remote_index": lambda n, i, x, s: x + torch.arange(20.0)[(s.abs() * 5).long().clamp(max=19)],
    "index": lambda n, i, x, s: x[:, s[0, :, 0].argsort()],
    "setitem": lambda n, i, x, s: x.clone().__setitem__((slice(None), s[0, :2, 0].argsort()), 0.0) or x,
    "out": lambda n, i, x, s: torch.mul(x.detach(), 2, out=torch.empty_like(x)) + x,
    "foreach": lambda n, i, x, s: torch._foreach_mul([x, s], 0.5)[0] + s,
    "operators": lambda n, i, x, s: 1 - (2 ** -abs(x) / (1 + s**2)) % 0.7 + s @ s.mT @ x / 9,
    "unpacked": lambda n, i, x, s: torch.stack([a + b for a, b in zip(x, s, strict=True)]) + sum(s.unbind(0)) + len(s),
    "chunks": lambda n, i, x, s: torch.cat(
        [b * a.sigmoid() for a, b in zip(s.chunk(2, -1), x.split(4, -1), strict=True)], -1
    ),
    "checkpoint": lambda n, i, x, s: checkpoint(torch.mul, x, s, use_reentrant=False),
    "torch_ops": lambda n, i, x, s: torch.ops.aten.add.Tensor(x, s) * torch.ops.aten.sigmoid(s),
    "transposed": lambda n, i, x, s: x * s.data + s.mT.mT + s.real,
    "conversions": lambda n, i, x, s: x.to(s) + s.type(torch.float64).float() + torch.full_like(s, 0.1) + x.type_as(s),
    "as_tensor": lambda n, i, x, s: x + torch.as_tensor(s),
    "padded": lambda n, i, x, s: F.pad(F.interpolate(s, scale_factor=0.5), (2, 2)) + x,
    "no_grad": lambda n, i, x, s: x + torch.no_grad()(lambda: x * n.scale + s)().detach() * 0.1,
    "stopped": lambda n, i, x, s: x + s.detach() - s,
    "parameter": lambda n, i, x, s: x * n.scale.exp() + n.scale,
    "copied": lambda n, i, x, s: copy.copy({"h": x})["h"] + copy.deepcopy(x.detach()),
    "noise": lambda n, i, x, s: x + torch.randn(D) * random.random() + torch.empty(D).uniform_(),
    "dropout": lambda n, i, x, s: F.dropout(x, 0.3),
    "item": lambda n, i, x, s: x * 2 if x.abs().mean().item() > 0.05 else x,
    "any": lambda n, i, x, s: x * 1.5 if (x > 3).any() else x * 0.5,
    "for_logs": lambda n, i, x, s: (f"{x.mean():.3f}", x.detach().numpy().sum(), x.sum(-1)[0].tolist()) and x * 2,
    "asserted": lambda n, i, x, s: x if math.isfinite(float(x.detach().sum())) else 1 / 0,
    "topk": lambda n, i, x, s: x + ((best := s.topk(2, -1)).values * best.indices).sum(-1, keepdim=True),
    "retained": lambda n, i, x, s: (h := x * 1).retain_grad() or h,
    "function": lambda n, i, x, s: x + (pair := Cube.apply(s * x.tanh(), 0.5))[0] * pair[1],  # type: ignore[no-untyped-call]
    "keyword": lambda n, i, x, s: x + Cube.apply(s * x.tanh(), scale=0.5)[0],  # type: ignore[no-untyped-call]
    "facts": facts,
    "argmax": lambda n, i, x, s: x + x[:, int(x[0, :, 0].argmax())][:, None],
}


@pytest.mark.parametrize("form", FORMS)
def test_operations_between_modules(form: str) -> None:
    check(Net(FORMS[form], before=first), stages=(2, 4))


def test_what_can_be_asked_of_parameters_of_other_stages() -> None:
    root = nn.ModuleDict({"net": Net(facts, before=first)})
    assert_transparent_apart(root, lambda root: lambda: loss_of_net(root), is_unit, 2, 2e-6)


# ---- in place ----


def _plus(n: Net, i: int, x: Tensor, s: Tensor) -> Tensor:
    x += s
    return x


def _views(n: Net, i: int, x: Tensor, s: Any) -> Tensor:
    row = x[:, 0]
    row += 1
    x[:, 1:].mul_(2)
    x[:, 2] = x[:, 3].clone() * n.scale
    return x


def _sum(n: Net, i: int, x: Tensor, s: Tensor) -> Tensor:
    s += x
    return x + s.mean()


def _slots(n: Net, i: int, x: Tensor, s: Tensor) -> Tensor:
    s[:, i] = x[:, 0]
    return x + s.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("between", "before"),
    [
        (_plus, lambda n, x: n.head(x)),
        (lambda n, i, x, s: F.relu_(x), None),
        (_views, None),
        (_sum, lambda n, x: torch.zeros_like(x)),
        (_slots, lambda n, x: x.new_zeros(len(x), 5, D)),
        (lambda n, i, x, s: x.masked_fill_(s, 0.1).clamp_(max=2), lambda n, x: x > 1),
    ],
    ids=["plus", "relu", "views", "running_sum", "slots", "masked"],
)
def test_changes_in_place(between: Between, before: Before | None) -> None:
    check(Net(between, before=before))


# ---- random numbers ----


@pytest.mark.parametrize(
    ("between", "before"),
    [
        (None, None),
        (lambda n, i, x, s: F.dropout(x, 0.3), None),
        (lambda n, i, x, s: F.dropout(x + torch.randn(D), 0.3), None),
        (lambda n, i, x, s: F.dropout(F.dropout(x, 0.3), 0.2), None),
        (lambda n, i, x, s: F.dropout(x, 0.3) + torch.randn(D), None),
        (lambda n, i, x, s: x + torch.bernoulli(x.sigmoid()) + torch.empty_like(x).normal_() + torch.rand(D), None),
        (lambda n, i, x, s: x + torch.normal(x.transpose(0, 1), 0.1).transpose(0, 1) + torch.rand(D), None),
        (lambda n, i, x, s: x * np.random.rand(), None),
        (lambda n, i, x, s: x if torch.rand(()) < 0.5 else x * 2, None),
    ],
    ids=["inside", "between", "noise_then", "twice", "then_noise", "likes_then", "normal_then", "numpy", "decides"],
)
def test_draws_are_those_of_one_process(between: Between | None, before: Before | None) -> None:
    check(Net(between, p=0.5, before=before))


def test_how_much_is_drawn_by_the_values_of_one_stage_says_nothing_to_the_others() -> None:
    def drawn(x: Tensor) -> Tensor:
        return x + torch.poisson(x.sigmoid()) + torch.rand(D)

    root = nn.ModuleDict({"net": Net(lambda n, i, x, s: drawn(x))})
    assert program_of(root, lambda: loss_of_net(root), is_unit).units == ("net",)
    net = Net()
    with pytest.raises(SplitError, match=r"how many random numbers it draws .* into a module of its own"):
        program_of(net, lambda: drawn(net(X)).sum(), is_unit)
    check(Net(lambda n, i, x, s: x + torch.poisson(x.sigmoid())))  # nothing is drawn behind it


# ---- the end of a stage ----


def test_code_around_modules_may_catch_the_end_of_a_stage() -> None:
    def swallowed(root: nn.Module) -> Any:
        try:
            return loss_of_net(root)
        except BaseException:
            return None

    check(Net(), swallowed)


# ---- precision, compiled modules, hooks ----


def test_full_backward_hooks() -> None:
    net = Net(lambda n, i, x, s: x * 2)
    fired: list[float] = []
    net.blocks[1].register_full_backward_hook(lambda m, gi, go: fired.append(float(go[0].norm())))
    net.blocks[3].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    net.blocks[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.9,))
    check(net)
    assert len(fired) == 4  # one process, and each number of stages: once
    assert max(fired) == pytest.approx(min(fired), rel=1e-5)
    root = nn.ModuleDict({"net": net})
    net.register_full_backward_hook(lambda m, gi, go: None)  # its two ends are on one stage
    assert program_of(root, lambda: loss_of_net(root), is_unit).units == ("net",)


def test_a_hook_that_is_registered_late_sees_the_whole_gradient() -> None:
    """Behind a later module: no stage begins between what makes the tensor and the hook."""
    norms: list[float] = []

    def late(n: Net, i: int, x: Tensor, s: dict[str, Tensor]) -> Tensor:
        if i == 0:
            s["early"] = x
        if i == 3:
            s["early"].register_hook(lambda g: norms.append(float(g.norm())) or g * 0.5)
            return x + s["early"]
        return x

    net = Net(late, before=lambda n, x: {})
    graph = check(net, stages=(2,))
    units = [node for node in graph.nodes if node.module is not None]
    reasons = {node.module: reason_not_to_cut(graph, node.index) for node in units[1:]}
    forbidden = {name for name, reason in reasons.items() if reason is not None}
    assert forbidden == {"net.blocks.1", "net.blocks.2", "net.blocks.3"}
    assert all("test_step_run.py" in (reasons[name] or "") for name in forbidden)
    assert len(norms) == 2
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def clamps_its_input(layer: Layer, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return layer.linear(x)


def twice_used(net: Layers, x: Tensor) -> Tensor:
    h = net.a(x)
    k = net.b(h)
    return net.c(net.clamps(h) + k).sum()


def test_a_hook_that_a_unit_registers_on_its_input_sees_the_whole_gradient() -> None:
    """Before the unit's first operation: no stage begins at that unit, which would have a part of the gradient."""
    torch.manual_seed(0)
    units, x = {"a", "b", "c", "clamps"}, batch()
    net = Layers(twice_used, clamps=Layer(clamps_its_input))
    graph = program_of(net, lambda: net(x), units.__contains__)
    (clamped,) = [node.index for node in graph.nodes if node.module == "clamps"]
    assert reason_not_to_cut(graph, clamped) is not None
    assert_transparent(net, lambda root: lambda: root(x), units.__contains__, each_cut)


# ---- compiled code between units, which sees no run of ours ----


def as_it_is(graph: Any, inputs: Any) -> Any:
    """A backend of the compiler."""
    return graph.forward


@torch.compile(backend=as_it_is, fullgraph=True)
def compiled_between(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def draws_between_compiled(layer: Layer, x: Tensor) -> Tensor:
    return compiled_between(layer.last(compiled_between(layer.dropout(layer.linear(x)))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler reads it
@pytest.mark.parametrize("is_opened", [True, False])
def test_compiled_code_beside_a_module_that_draws(is_opened: bool) -> None:
    """Opened, it and a module in it draw; a unit compiles what draws."""
    torch.manual_seed(0)
    layer = Layer(draws_between_compiled if is_opened else lambda s, x: s.compiled(x) * 2)
    layer.dropout, layer.last = nn.Dropout(0.5), nn.Linear(len(batch()[0]), len(batch()[0]))
    layer.compiled = torch.compile(lambda x: layer.dropout(layer.linear(x)).tanh(), backend=as_it_is)
    net = Layers(lambda s, x: s.b(s.layer(compiled_between(s.a(x)))).sum(), layer=layer)
    assert_transparent(net, lambda root: lambda: root(batch()), lambda name: name != "layer" or not is_opened, each_cut)


# ---- checkpoints ----


@pytest.mark.parametrize("how", [True, "offload"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_checkpointed_units(p: float, how: Checkpointing) -> None:
    """Buffers are written once."""
    net = Net(lambda n, i, x, s: x * 2, p=p)
    net.blocks[1] = nn.Sequential(nn.Linear(D, D), nn.Flatten(0, 1), nn.BatchNorm1d(D), nn.Unflatten(0, (-1, 5)))
    check(net, checkpointing=how)


class Averaging(nn.Tanh):
    """Its buffer is another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = (self.mean + x.detach().mean()) / 2
        return super().forward(x)


def test_a_buffer_that_is_replaced_is_replaced_once() -> None:
    module = Averaging()
    activations.call(True, module, module.forward, torch.ones(2, requires_grad=True)).sum().backward()
    assert module.mean == 0.5


class Regions(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        scaled = x.detach() * 2
        for block in self.blocks:

            def region(x: Tensor, block: nn.Module = block) -> Tensor:
                return torch.sin(block(x)) + scaled * self.scale

            x = checkpoint(region, x, use_reentrant=self.reentrant) * 1.1
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_the_users_own_regions(p: float, reentrant: bool) -> None:
    net = Regions(p=p)
    net.reentrant = reentrant
    check(net)


def test_no_stage_begins_inside_of_a_region() -> None:
    class Pairs(Net):
        def forward(self, x: Tensor) -> Tensor:
            for i in (0, 2):
                pair = (self.blocks[i], self.blocks[i + 1])
                x = checkpoint(lambda x, pair=pair: pair[1](pair[0](x).relu()), x, use_reentrant=False)
            return self.head(self.blocks[4](x))

    graph = check(Pairs(p=0.5), stages=(2, 3))
    names = [graph.nodes[cut].module for cut in possible_cuts(graph)]
    assert names == ["net.blocks.2", "net.blocks.4", "net.head"]


# ---- what cannot be followed ----


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize(
    "form",
    [
        lambda n, i, x, s: x + torch.tensor(s[0, 0].detach()),
        lambda n, i, x, s: x + torch.full_like(x, fill_value=s.detach().mean()),
    ],
    ids=["tensor", "full_like"],
)
def test_numbers_that_escape_leave_no_cut_behind_them(form: Between) -> None:
    root = nn.ModuleDict({"net": Net(form, before=first)})
    graph = program_of(root, lambda: loss_of_net(root), is_unit)
    escape = next(node.index for node in graph.nodes if node.name.split(" ")[0] in ("tensor", "full_like"))
    assert all(cut <= escape for cut in possible_cuts(graph))


def test_a_run_is_freed_with_its_step() -> None:
    """Stand-ins and their run knew each other: what the stage had received stayed until Python looked for cycles."""
    root = nn.ModuleDict({"net": Net()})
    graph = program_of(root, lambda: loss_of_net(root), is_unit)
    stages = stages_on(root, graph, even_cuts(graph, 3), lambda: loss_of_net(root))
    gc.collect()
    before = [found for found in gc.get_objects() if type(found) is StageRun]  # of other tests, kept by something
    gc.disable()
    try:
        run_stages(graph, stages)
        assert [found for found in gc.get_objects() if type(found) is StageRun and found not in before] == []
    finally:
        gc.enable()
