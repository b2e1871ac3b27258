"""A stage's run: what users write between modules, inside of them and around them, in two to four stages."""

from __future__ import annotations

import contextlib
import copy
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

from lightning_smddp.pipeline.capture.boundaries import possible_cuts, reason_not_to_cut
from lightning_smddp.pipeline.runtime.remote import ReplayError, Shapes
from tests.pipeline.stage_emulation import (
    Stage,
    even_cuts,
    gradients,
    plainly,
    plans_of,
    program,
    program_of,
    run_stages,
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
    checkpointing: bool = False,
    small: Callable[[str], bool] = is_unit,
) -> None:
    """Losses and gradients of so many stages are those of a plain step with the same seeds."""
    root = nn.ModuleDict({"net": net})
    graph = program_of(root, lambda: loss(root), small)
    root.zero_grad()
    with plainly(root):
        expected = loss(root)
        expected.backward()
    reference = gradients(root)
    for count in stages:
        root.zero_grad()
        cuts = even_cuts(graph, count)
        assert len(cuts) == count - 1
        made = [program(graph, plan, root, checkpointing) for plan in plans_of(graph, cuts)]
        actual = run_stages(graph, [Stage(root, one, lambda: loss(root)) for one in made])
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(gradients(root), reference, rtol=2e-6, atol=2e-6)
    root.zero_grad()


def first(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(net.head(x))


# ---- operations between modules ----

FORMS: dict[str, Between] = {
    "cat": lambda n, i, x, s: torch.cat([x, s, x], -1)[..., D // 2 : D // 2 + D],
    "stack": lambda n, i, x, s: torch.stack((x, s)).mean(0),
    "where": lambda n, i, x, s: torch.where(s > 0, x, x * n.scale),
    "gather": lambda n, i, x, s: x.gather(-1, s.argsort(-1)),
    "free_by_remote_index": lambda n, i, x, s: x + torch.arange(20.0)[(s.abs() * 5).long().clamp(max=19)],
    "index": lambda n, i, x, s: x[:, s[0, :, 0].argsort()],
    "setitem": lambda n, i, x, s: x.clone().__setitem__((slice(None), s[0, :2, 0].argsort()), 0.0) or x,
    "einsum": lambda n, i, x, s: torch.einsum("btd,bsd,bse->bte", x, s, s).tanh(),
    "attention": lambda n, i, x, s: F.scaled_dot_product_attention(x, s, s),
    "out": lambda n, i, x, s: torch.mul(x.detach(), 2, out=torch.empty_like(x)) + x,
    "layer_norm": lambda n, i, x, s: F.layer_norm(x, (D,), s[0, 0]),
    "foreach": lambda n, i, x, s: torch._foreach_mul([x, s], 0.5)[0] + s,
    "operators": lambda n, i, x, s: 1 - (2 ** -abs(x) / (1 + s**2)) % 0.7 + s @ s.mT @ x / 9,
    "mirrored": lambda n, i, x, s: x * (s < 0.5) + (s <= 1) * x,
    "unpacked": lambda n, i, x, s: torch.stack([a + b for a, b in zip(x, s, strict=True)]) + sum(s.unbind(0)) + len(s),
    "chunks": lambda n, i, x, s: torch.cat(
        [b * a.sigmoid() for a, b in zip(s.chunk(2, -1), x.split(4, -1), strict=True)], -1
    ),
    "checkpoint": lambda n, i, x, s: checkpoint(torch.mul, x, s, use_reentrant=False),
    "torch_ops": lambda n, i, x, s: torch.ops.aten.add.Tensor(x, s) * torch.ops.aten.sigmoid(s),
    "transposed": lambda n, i, x, s: x * s.data + s.mT.mT + s.real,
    "conversions": lambda n, i, x, s: x.to(s) + s.type(torch.float64).float() + torch.full_like(s, 0.1) + x.type_as(s),
    "as_tensor": lambda n, i, x, s: x + torch.as_tensor(s),
    "numbers": lambda n, i, x, s: x * (s.shape[0] / s.numel()) ** 0.5 + s.dim() + s.size(-1) * s.stride(0),
    "padded": lambda n, i, x, s: F.pad(F.interpolate(s, scale_factor=0.5), (2, 2)) + x,
    "no_grad": lambda n, i, x, s: x + torch.no_grad()(lambda: x * n.scale + s)().detach() * 0.1,
    "stopped": lambda n, i, x, s: x + s.detach() - s,
    "parameter": lambda n, i, x, s: x * n.scale.exp() + n.scale,
    "copied": lambda n, i, x, s: copy.copy({"h": x})["h"] + copy.deepcopy(x.detach()),
    "noise": lambda n, i, x, s: x + torch.randn(D) * random.random() + np.random.rand(),
    "dropout": lambda n, i, x, s: F.dropout(x, 0.3),
    "item": lambda n, i, x, s: x * 2 if x.abs().mean().item() > 0.05 else x,
    "any": lambda n, i, x, s: x * 1.5 if (x > 3).any() else x * 0.5,
    "float": lambda n, i, x, s: x / (1 + float(x.detach().norm())),
    "for_logs": lambda n, i, x, s: (f"{x.mean():.3f}", x.detach().numpy().sum(), x.sum(-1)[0].tolist()) and x * 2,
    "asserted": lambda n, i, x, s: x if math.isfinite(float(x.detach().sum())) else 1 / 0,
    "argmax": lambda n, i, x, s: x + x[:, int(x[0, :, 0].argmax())][:, None],
}


@pytest.mark.parametrize("form", FORMS)
def test_operations_between_modules(form: str) -> None:
    check(Net(FORMS[form], before=first), stages=(2, 4))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(y)
        return x * y, y

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g * ctx.saved_tensors[0], None


def test_autograd_functions_are_one_operation() -> None:
    check(Net(lambda n, i, x, s: sum(Twice.apply(x, s)), before=first))  # type: ignore[no-untyped-call]


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


def test_modules_that_write_their_argument() -> None:
    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            x.mul_(1.25)
            return self.b(x)

    net = Net(lambda n, i, x, s: x + 1)
    net.blocks = nn.ModuleList([Writing() for _ in range(5)])
    check(net)


def test_a_sum_that_no_module_sees_is_sent() -> None:
    def loss(root: nn.Module) -> Tensor:
        x, aux = X, torch.zeros(())
        for block in root.net.blocks:
            x = block(x)
            aux = aux + x.pow(2).mean()
        return F.cross_entropy(root.net.head(x).flatten(0, 1), Y.flatten()) + 0.1 * aux

    check(Net(), loss)


# ---- random numbers ----


@pytest.mark.parametrize(
    ("between", "before"),
    [
        (None, None),
        (lambda n, i, x, s: F.dropout(x, 0.3), None),
        (lambda n, i, x, s: F.dropout(x + torch.randn(D), 0.3), None),
        (lambda n, i, x, s: x * np.random.rand(), None),
        (lambda n, i, x, s: x if torch.rand(()) < 0.5 else x * 2, None),
    ],
    ids=["inside", "between", "noise_then_dropout", "numpy", "decides"],
)
def test_draws_are_those_of_one_process(between: Between | None, before: Before | None) -> None:
    check(Net(between, p=0.5, before=before))


def test_draws_do_not_depend_on_cuts() -> None:
    """Two dropouts follow each other without a module between: each has a seed of its own, in any number of stages."""
    net = Net(lambda n, i, x, s: F.dropout(F.dropout(x, 0.3) + s, 0.2), before=lambda n, x: torch.randn_like(x))
    root = nn.ModuleDict({"net": net})
    graph = program_of(root, lambda: loss_of_net(root), is_unit)
    assert graph.mixes_draws
    losses = []
    for cuts in ([], even_cuts(graph, 2), even_cuts(graph, 4)):
        made = [program(graph, plan, root) for plan in plans_of(graph, cuts)]
        losses.append(run_stages(graph, [Stage(root, one, lambda: loss_of_net(root)) for one in made]))
    assert losses[0] == losses[1] == losses[2]


def test_a_module_that_is_opened_or_whole_draws_the_same() -> None:
    for small in (is_unit, lambda name: name.count(".") > 2 or name == "net.head"):
        check(Net(p=0.5), small=small)


# ---- precision, compiled modules, hooks ----


def test_autocast() -> None:
    def loss(root: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(root.net(X).flatten(0, 1).float(), Y.flatten())

    check(Net(lambda n, i, x, s: F.gelu(x) * n.scale), loss)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo asks for it
@pytest.mark.parametrize("by_method", [False, True])
def test_compiled_modules(by_method: bool) -> None:
    net = Net(lambda n, i, x, s: x * n.scale)
    if by_method:
        for block in net.blocks:
            block.compile(backend="eager")
    else:
        net.blocks = nn.ModuleList([torch.compile(Block(), backend="eager") for _ in range(5)])
    check(net)


def test_forward_hooks_that_change_and_collect() -> None:
    seen: list[Tensor] = []
    net = Net(lambda n, i, x, s: x * 2)
    net.blocks[1].register_forward_hook(lambda m, a, o: o * 1.5)
    net.blocks[2].register_forward_pre_hook(lambda m, a: (a[0] + 0.5,))
    net.blocks[3].register_forward_hook(lambda m, a, o: seen.append(o))

    def loss(root: nn.Module) -> Tensor:
        seen.clear()
        return loss_of_net(root) + seen[0].square().mean()

    check(net, loss)


def test_full_backward_hooks() -> None:
    net = Net(lambda n, i, x, s: x * 2)
    fired: list[float] = []
    net.blocks[1].register_full_backward_hook(lambda m, gi, go: fired.append(float(go[0].norm())))
    net.blocks[3].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    net.blocks[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.9,))
    check(net)
    assert len(fired) == 4  # one process, and each number of stages: once
    assert max(fired) == pytest.approx(min(fired), rel=1e-5)


def test_a_tensors_hook_fires_once() -> None:
    counts: list[int] = []

    def hooked(n: Net, i: int, x: Tensor, s: Any) -> Tensor:
        if i == 1:
            x.register_hook(lambda g: counts.append(1) or g * 0.5)
        return x

    check(Net(hooked))
    assert len(counts) == 4


@pytest.mark.parametrize("used_between", [True, False])
def test_a_hook_that_is_registered_late_sees_the_whole_gradient(used_between: bool) -> None:
    """Behind a later module: on the stage of the tensor's first use, or no stage begins between that and the hook."""
    norms: list[float] = []

    def late(n: Net, i: int, x: Tensor, s: dict[str, Tensor]) -> Tensor:
        if i == 0:
            s["early"] = x
            return torch.ones_like(x) if used_between else x
        if i == 3:
            s["early"].register_hook(lambda g: norms.append(float(g.norm())) or g * 0.5)
            return x + s["early"]
        return x

    net = Net(late, before=lambda n, x: {})
    check(net, stages=(2,))
    graph = program_of(nn.ModuleDict({"net": net}), lambda: loss_of_net(nn.ModuleDict({"net": net})), is_unit)
    units = [node for node in graph.nodes if node.module is not None]
    reasons = {node.module: reason_not_to_cut(graph, node.index) for node in units[1:]}
    forbidden = {name for name, reason in reasons.items() if reason is not None}
    assert forbidden == (set() if used_between else {"net.blocks.2", "net.blocks.3"})
    assert all("test_step_run.py" in (reasons[name] or "") for name in forbidden)
    assert len(norms) == 2
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


# ---- checkpoints ----


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_checkpointed_units(p: float) -> None:
    check(Net(lambda n, i, x, s: x * 2, p=p), checkpointing=True)


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

    check(Pairs(p=0.5), stages=(2, 3))
    root = nn.ModuleDict({"net": Pairs()})
    graph = program_of(root, lambda: loss_of_net(root), is_unit)
    names = [graph.nodes[cut].module for cut in possible_cuts(graph)]
    assert names == ["net.blocks.2", "net.blocks.4", "net.head"]


def test_a_region_closes_over_another_stages_tensor() -> None:
    class Closing(Net):
        def forward(self, x: Tensor) -> Tensor:
            gate = torch.sigmoid(self.blocks[0](x))
            for block in self.blocks[1:]:
                x = checkpoint(lambda x, block=block: block(x) * gate, x, use_reentrant=False)
            return self.head(x)

    check(Closing())


# ---- another kind of batch ----


def test_shapes_of_another_kind_of_batch() -> None:
    net = Net(
        lambda n, i, x, s: (
            (x.reshape(len(x), -1).reshape(x.shape) * n.scale + s).transpose(0, 1).contiguous().mT.mT.transpose(0, 1)
        ),
        before=lambda n, x: n.head(x).mean(1, keepdim=True),
    )
    root = nn.ModuleDict({"net": net})
    batch = [X]
    graph = program_of(root, lambda: root.net(batch[0]).square().mean(), is_unit)
    made = [program(graph, plan, root) for plan in plans_of(graph, even_cuts(graph, 3))]
    stages = [Stage(root, one, lambda: root.net(batch[0]).square().mean()) for one in made]
    batch[0] = torch.randn(3, 9, D)
    expected = root.net(batch[0]).square().mean()
    found = Shapes()
    for shapes, record in ((Shapes(), found), (found, None)):
        torch.testing.assert_close(run_stages(graph, stages, shapes, record), expected)
    root.zero_grad()


# ---- what cannot be followed ----


def test_another_path_is_an_error_that_says_where() -> None:
    net = Net(lambda n, i, x, s: x * 2 if len(x) > 3 else x + n.scale)
    root = nn.ModuleDict({"net": net})
    batch = [X]
    graph = program_of(root, lambda: root.net(batch[0]).sum(), is_unit)
    made = [program(graph, plan, root) for plan in plans_of(graph, even_cuts(graph, 3))]
    batch[0] = X[:2]
    with pytest.raises(ReplayError, match=r"(add|mul) at .*test_step_run.py:\d+"):
        run_stages(graph, [Stage(root, one, lambda: root.net(batch[0]).sum()) for one in made], Shapes(), Shapes())


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize(
    "form",
    [
        lambda n, i, x, s: x + torch.tensor(s[0, 0].detach()),
        lambda n, i, x, s: x + torch.full_like(x, s.detach().mean()),
    ],
    ids=["tensor", "full_like"],
)
def test_numbers_that_escape_leave_no_cut_behind_them(form: Between) -> None:
    root = nn.ModuleDict({"net": Net(form, before=first)})
    graph = program_of(root, lambda: loss_of_net(root), is_unit)
    escape = next(node.index for node in graph.nodes if node.name.split(" ")[0] in ("tensor", "full_like"))
    assert all(cut <= escape for cut in possible_cuts(graph))


def test_code_that_catches_everything() -> None:
    class Swallowing(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                with contextlib.suppress(BaseException):
                    x = block(x)
                x = x * 2
            return self.head(x)

    check(Swallowing())


def test_a_penalty_over_all_parameters_needs_them_on_the_last_stage() -> None:
    def loss(root: nn.Module) -> Tensor:
        return loss_of_net(root) + sum(p.square().sum() for p in root.parameters())

    root = nn.ModuleDict({"net": Net()})
    graph = program_of(root, lambda: loss(root), is_unit)
    used = {name for node in graph.nodes[even_cuts(graph, 2)[0] :] for name in node.parameters}
    assert used >= {name for name, _ in root.named_parameters() if "scale" not in name}
    check(Net(), loss)


def test_frozen_first_modules() -> None:
    net = Net(lambda n, i, x, s: x * 2)
    for block in net.blocks[:2]:
        block.requires_grad_(False)
    check(net)


def test_a_sparse_tensor_between_modules_is_made_again_or_not_sent() -> None:
    def loss(root: nn.Module) -> Tensor:
        x = root.net.blocks[0](X)
        sparse = (x * (x > 0)).to_sparse()
        return (root.net.blocks[1](x) + sparse.to_dense()).mean()

    def loss_that_writes(root: nn.Module) -> Tensor:
        x = root.net.blocks[0](X)
        sparse = (x * (x > 0)).to_sparse().mul_(2.0)
        return (root.net.blocks[1](x) + sparse.to_dense()).mean()

    check(Net(), loss, stages=(2,))
    root = nn.ModuleDict({"net": Net()})
    graph = program_of(root, lambda: loss_that_writes(root), is_unit)
    assert possible_cuts(graph) == []
