"""What a trace sees, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.tracer import trace
from tests.pipeline.example_modules import CPU, Cube, D, Layer, Net, batch, record


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

    said = r"test_tracing.py:\d+.*function modes do not see.*module of its own"
    with torch.set_grad_enabled(grad), pytest.raises(SplitError, match=said):
        graph_of_step(root, step)


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


def test_random_numbers_are_put_back() -> None:
    def state() -> tuple[Any, ...]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    layer = Layer(lambda s, x: F.dropout(s.linear(x)) * random.random() * float(np.random.rand()))
    net = Net(lambda s, x: s.inner(x + torch.randn_like(x)).mean(), inner=layer)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    expected = state()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    record(net)
    assert state() == expected


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
