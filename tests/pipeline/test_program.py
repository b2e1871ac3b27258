"""A step as a graph: what a trace sees and leaves, what may be a unit, where a step may be cut, what crosses a cut."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.boundaries import StagePlan, cut_into_stages, possible_cuts, reason_not_to_cut
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.ops import user_location
from lightning_smddp.pipeline.capture.tracer import trace
from lightning_smddp.pipeline.partition.costs import time_nodes
from tests.pipeline.example_modules import CPU, Cube, D, Layer, Net, batch, children, graph_of, record


def graph_of_step(root: nn.Module, step: Callable[[], Tensor]) -> StepGraph:
    """Of a step in which operations on the batch are outside of all modules."""
    found = trace(step, root, CPU)
    modules = Modules(found, root)
    return build_graph(found, modules, modules.calls)


def unseen(x: Tensor) -> Tensor:
    """An operation that no function mode sees, as those of an extension."""
    with torch._C.DisableTorchFunction():
        return x * 2


@torch.library.custom_op("smddp_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_autograd(lambda ctx, g: g * 2)


@pytest.mark.parametrize(
    "operation", [lambda x: torch.ops.aten.mul.Tensor(x, 2), twice, lambda x: Cube.apply(x, 1.0)[0]]
)
@pytest.mark.parametrize("grad", [True, False])
def test_operators_and_functions_of_ones_own_are_seen(operation: Callable[[Tensor], Tensor], grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        found, modules = record(Net(lambda s, x: s.b(operation(s.a(x))).mean()))
    assert len(found.events) == 4
    assert not modules.must_be_whole


@pytest.mark.parametrize("grad", [True, False])
def test_unseen_operations_seal_their_module(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        found, modules = record(
            Net(lambda s, x: s.b(s.inner(s.a(x))).mean(), inner=Layer(lambda s, x: unseen(s.linear(x))))
        )
    assert set(modules.must_be_whole) == {"net.inner"}
    graph = build_graph(found, modules, ())
    assert [item.module for item in graph.nodes if item.module] == ["net.inner"]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("operation", [unseen, lambda x: torch.vmap(lambda row: row * 2)(x)])
def test_unseen_operations_outside_of_modules_are_refused(operation: Callable[[Tensor], Tensor], grad: bool) -> None:
    root = nn.Linear(D, D)

    def step() -> Tensor:
        return operation(F.linear(batch(), root.weight)).mean()

    said = r"test_program.py:\d+.*function modes do not see.*module of its own"
    with torch.set_grad_enabled(grad), pytest.raises(SplitError, match=said):
        graph_of_step(root, step)


def test_a_place_is_the_innermost_of_the_users() -> None:
    assert user_location() == f"{__file__}:{sys._getframe().f_lineno}"


def numbers(s: Layer, x: Tensor) -> tuple[Tensor, float]:
    h = s.linear(x)
    return h, h.mean().item()


def change(s: Layer, x: Tensor) -> Tensor:
    h = s.linear(x)
    x.mul_(2)
    return h


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (numbers, "other stages could not make"),
        (lambda s, x: (s.linear(x), random.random() < 2), "other stages could not make"),
        (lambda s, x: torch.from_dlpack(x.detach()) + torch.from_numpy(x.detach().numpy().copy()), "the batch alone"),
        (change, "in place"),
    ],
)
def test_what_other_stages_could_not_make_is_not_hidden_in_a_unit(layer: Callable[..., Any], reason: str) -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        found = s.inner(x)
        h = found[0] if isinstance(found, tuple) else found
        return (s.b(h) * x).mean()

    _, modules = record(Net(body, inner=Layer(layer)))
    assert reason in modules.not_placeable["net.inner"]


def test_what_changed_before_a_module_that_takes_it_cannot_be_followed() -> None:
    """The module that saw the change first took it for its own: cuts then missed a value (``KeyError``)."""
    root = nn.ModuleDict({"a": nn.Linear(D, D)})

    def step() -> Tensor:
        x = batch()
        x.data.add_(root["a"].bias.detach())
        return (root["a"](x) - x).mean()

    with pytest.raises(SplitError, match="changed through another view"):
        graph_of_step(root, step)


def is_patched(module: nn.Module) -> bool:
    return any("forward" in m.__dict__ for m in module.modules())


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind(error: type[BaseException] | None) -> None:
    apply = torch.autograd.Function.__dict__["apply"]

    def body(s: Net, x: Tensor) -> Tensor:
        assert is_patched(s)
        h = s.a(x)
        kept.append(weakref.ref(h))
        if error is not None:
            raise error
        return s.b(h).mean()

    kept: list[weakref.ref[Tensor]] = []
    net = Net(body)
    gc.disable()
    try:
        if error is None:
            record(net)
        else:
            with pytest.raises(error):
                record(net)
            gc.collect()  # the exception's frames
        assert kept[0]() is None
    finally:
        gc.enable()
    assert not is_patched(net)
    assert torch._C._len_torch_function_stack() == 0
    assert torch.autograd.Function.__dict__["apply"] is apply
    for parameter in net.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.empty_like(parameter, device="meta")))


@pytest.mark.parametrize("new", [None, torch.zeros(D)])
def test_a_buffer_that_is_replaced_or_taken_away_is_refused(new: Tensor | None) -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        s.inner.mean = new
        return s.b(s.a(x)).mean()

    layer = Layer(lambda s, x: x)
    layer.register_buffer("mean", torch.zeros(D))
    found, _ = record(Net(body, inner=layer))
    (refusal,) = found.refusals
    assert "replaces buffer 'net.inner.mean'" in refusal


def test_changes_of_many_parameters_at_once_are_seen() -> None:
    """As momentum encoders are updated by `torch._foreach_mul_`, which counts no versions."""

    def body(s: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_mul_(list(s.b.parameters()), 0.5)
        return s.b(s.a(x)).mean()

    found, _ = record(Net(body))
    (refusal,) = found.refusals
    assert "changes parameter 'net.b.weight' in place" in refusal


# ---- units and cuts ----


def names(found: StepGraph) -> list[str]:
    return [item.name.partition(" at")[0] for item in found.nodes]


def test_units_are_the_outermost_small_modules() -> None:
    sequential = nn.Sequential(nn.Linear(D, D), nn.ReLU())
    found = graph_of(lambda s, x: (s.sequential(x) + s.a(x)).mean(), sequential=sequential)
    assert names(found) == ["net.sequential", "net.a", "add", "mean"]
    assert found.units == ("net.sequential", "net.a")
    opened = graph_of(
        lambda s, x: (s.sequential(x) + s.a(x)).mean(), lambda name: name.count(".") > 1, sequential=sequential
    )
    assert names(opened) == ["net.sequential.0", "net.sequential.1", "linear", "add", "mean"]


@pytest.mark.parametrize(
    "read",
    [
        lambda h: bool(h.mean() > 0),
        lambda h: len(h.tolist()),
        lambda h: h.detach().numpy().mean().item(),
        lambda h: int(torch.allclose(h, h)),
    ],
)
def test_what_python_reads_is_sent_on_and_read_again(read: Callable[[Tensor], float]) -> None:
    found = graph_of(lambda s, x: s.c(s.b(h := s.a(x)) * read(h)).mean())
    (reader,) = (node.index for node in found.nodes if node.reads)
    cut = names(found).index("net.c")
    assert cut in possible_cuts(found)
    _, second = cut_into_stages(found, [cut])
    assert reader in second.recomputed


def test_neither_placed_nor_opened() -> None:
    kept: list[Tensor] = []

    def write(s: Layer, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            kept.append(x * 2)
        return s.linear(x)

    with pytest.raises(
        SplitError, match=r"'net.inner' cannot be placed.*test_program.py.*cannot be opened.*return all"
    ):
        graph_of(lambda s, x: (s.inner(s.a(x)) + kept.pop()).mean(), inner=Layer(write))


def test_a_buffer_stays_with_what_changes_it() -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        return s.bn(s.c(s.bn(s.a(x)))).mean()

    found = graph_of(body, bn=nn.BatchNorm1d(D))
    first, second = (i for i, name in enumerate(names(found)) if name == "net.bn")
    assert set(possible_cuts(found)) == {first}
    assert set(found.nodes[first].buffers) == {
        f"net.bn.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert reason_not_to_cut(found, second) is not None


@pytest.mark.parametrize("read", [float, lambda mean: (mean.clone() * 2).sum()])
def test_what_is_made_of_a_changed_buffer_stays_with_it(read: Callable[[Tensor], Any]) -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        h = s.a(x)
        s.mean.lerp_(h.detach().mean(), 0.1)
        factor = read(s.mean)  # a later stage would make it of its own buffer
        return s.c(s.b(h)).mean() * factor

    found = graph_of(body, mean=torch.ones(()))
    assert [found.nodes[cut].name for cut in possible_cuts(found)] == []
    assert "uses a buffer that the step changes" in str(reason_not_to_cut(found, names(found).index("net.b")))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_parameters_stay_where_they_are() -> None:
    with pytest.raises(SplitError, match=r"'net.inner' is scripted .* script it afterwards"):
        graph_of(lambda s, x: s.b(s.inner(s.a(x))).mean(), inner=torch.jit.script(nn.Linear(D, D)))
    relu = torch.jit.script(nn.ReLU())
    assert "net.relu" in names(graph_of(lambda s, x: s.b(s.relu(s.a(x))).mean(), relu=relu))


def test_sizes_that_depend_on_values_stay_inside() -> None:
    def routed(s: Layer, x: Tensor) -> Tensor:
        out, chosen = torch.zeros_like(x), s.relu(s.linear(x)).sum(1) > 0
        out[chosen] = s.linear(x[chosen])
        return out

    experts = Layer(routed)
    experts.relu = nn.ReLU()
    found = graph_of(lambda s, x: s.b(s.experts(s.a(x))).mean(), lambda name: name.count(".") > 1, experts=experts)
    assert "net.experts" in found.units


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[(x.sum(1) > 0).nonzero().flatten()]


def test_sizes_that_depend_on_values_and_leave_a_module() -> None:
    behind = graph_of(lambda s, x: s.positive(s.b(s.a(x))).mean(), positive=Positive())
    assert [item.name for item in behind.nodes if item.varies] == ["net.positive"]
    between = graph_of(lambda s, x: s.b(s.positive(s.a(x))).mean(), positive=Positive())
    assert between.units == ("net",)


def test_what_is_made_of_chosen_rows_may_have_a_size_of_its_own() -> None:
    root, x = nn.ModuleDict({name: nn.Linear(D, D) for name in "abc"}), torch.randn(4, D)

    def step() -> Tensor:
        h = root["a"](x)
        chosen = h[h.sum(1) > 0]
        h = root["b"](h + chosen.mean(0)) / chosen.square().sum()
        loss: Tensor = root["c"](h).mean()
        return loss

    traced = trace(step, root, CPU)
    found = build_graph(traced, Modules(traced, root), "abc")
    assert {names(found)[item.index] for item in found.nodes if item.varies} == {"__getitem__", "square"}
    assert [found.nodes[cut].name for cut in possible_cuts(found)] == ["c"]


# ---- what crosses a cut: enough, and no more than needed ----


def second_stage(graph: StepGraph, name: str) -> StagePlan:
    begin = next(node.index for node in graph.nodes if node.name.startswith(name))
    return cut_into_stages(graph, [begin])[1]


def test_a_residual_sum_crosses_as_one_tensor() -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        for layer in (s.a, s.b, s.c, s.d):
            x = x + layer(x)
        return x.mean()

    graph = graph_of(body)
    for name in ("net.b", "net.c", "net.d"):
        assert [graph.values[v].spec.shape for v in second_stage(graph, name).receives] == [(4, D)]


def test_a_mask_crosses_before_it_is_expanded() -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        mask = s.a(x).mean(-1, keepdim=True)
        wide = mask.expand(-1, D).exp() * torch.ones(8, 1, 1)
        h = s.b(x) * wide
        return s.c(h * wide.sum(0)).mean()

    graph = graph_of(body)
    second = second_stage(graph, "net.b")
    assert [graph.values[v].spec.shape for v in second.receives] == [(4, 1)]
    assert {names(graph)[index] for index in second.recomputed} == {"expand", "exp", "mul"}
    needed = sum(graph.values[value].nbytes for value in graph.needed_after(second.begin))
    assert sum(graph.values[value].nbytes for value in second.receives) < needed


def test_random_values_and_watched_ones_are_sent() -> None:
    def body(s: Net, x: Tensor) -> Tensor:
        small = s.a(x).mean(-1, keepdim=True)
        noisy = torch.nn.functional.dropout(small.expand(-1, D), 0.5)
        watched = small.expand(-1, D) * 2
        watched.register_hook(lambda g: g * 2)
        return (s.b(x) * noisy * watched).mean()

    graph = graph_of(body)
    second = second_stage(graph, "net.b")
    assert len(second.receives) == 2
    assert not second.recomputed


# ---- times ----


def timed(body: Callable[..., Tensor], backward: bool = True, **modules: nn.Module) -> tuple[nn.Module, Any, Any]:
    """The net, its graph, and the times of a run."""
    net = Net(body, **modules)
    root = nn.ModuleDict({"net": net})

    def step() -> Tensor:
        loss: Tensor = net(torch.ones(4, D))
        return loss

    traced = trace(step, root, CPU)
    known = Modules(traced, root)
    found = build_graph(traced, known, filter(children, known.calls))
    return net, found, time_nodes(found, step, lambda loss: loss if backward else None, root, CPU)


def test_a_run_times_units_forward_and_backward() -> None:
    """A unit that is called twice has half of its time in each node; what comes behind the last unit is the last's."""
    slow = nn.Sequential(*(nn.Linear(D, D) for _ in range(200)))

    def body(s: Net, x: Tensor) -> Tensor:
        return s.slow(s.a(s.slow(x))).relu().mean()

    net, found, times = timed(body, slow=slow)
    assert names(found) == ["net.slow", "net.a", "net.slow", "relu", "mean"]
    assert times.forward[0] == times.forward[2] > 5 * times.forward[1] > 0
    assert times.backward[0] == times.backward[2] > 5 * times.backward[1] > 0
    assert times.backward[3] == 0 < times.backward[4]
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not slow._forward_hooks
    _, _, evaluated = timed(body, backward=False, slow=slow)
    assert sum(evaluated.backward) == 0 < sum(evaluated.forward)
