"""Stages of a step, one after the other in one process: what a stage's run does, without any communication."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.activations import Checkpointing as How
from lightning_smddp.pipeline.capture.boundaries import StagePlan, cut_into_stages, possible_cuts
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.tracer import trace
from lightning_smddp.pipeline.runtime.stage_program import Shapes, StageProgram
from lightning_smddp.pipeline.runtime.step_run import run_stage
from lightning_smddp.pipeline.runtime.wrappers import Wrappers
from lightning_smddp.pipeline.state.meta_parameters import AbsentParameter, set_contents
from lightning_smddp.seeding import Generators, seeded_modules

CPU = torch.device("cpu")
SEED = 7
Step = Callable[[], Any]
MakeStep = Callable[[nn.Module], Step]
_wrappers: weakref.WeakKeyDictionary[nn.Module, Wrappers] = weakref.WeakKeyDictionary()


def wrappers_of(root: nn.Module) -> Wrappers:
    return _wrappers.setdefault(root, Wrappers(root, CPU))


def program(graph: StepGraph, plan: StagePlan, root: nn.Module, checkpointing: How = False) -> StageProgram:
    return StageProgram(graph, plan, wrappers_of(root), checkpointing)


@contextmanager
def plainly(root: nn.Module) -> Iterator[None]:
    """Around a plain run of a step of ``root``, which draws what stages draw."""
    generators = Generators(root, CPU)
    with seeded_modules(root, generators):
        generators.seed(SEED)
        yield


@dataclass
class Stage:
    """A stage with the module and the step that it runs."""

    root: nn.Module
    replay: StageProgram
    step: Step


def program_of(root: nn.Module, step: Step, is_small: Callable[[str], bool]) -> StepGraph:
    """The graph of ``step``; tracing leaves the buffers as they were."""
    buffers = _buffers(root)
    Generators(root, CPU).seed(SEED)
    record = trace(step, root, CPU)
    _put_back(root, buffers)
    modules = Modules(record, root)
    return build_graph(record, modules, filter(is_small, modules.calls))


def even_cuts(graph: StepGraph, num_stages: int) -> list[int]:
    """Cuts in stages of about equally many units, where cuts are allowed."""
    places = possible_cuts(graph)
    return sorted({places[len(places) * stage // num_stages] for stage in range(1, num_stages)})


def run_stages(
    graph: StepGraph, stages: Sequence[Stage], shapes: Shapes | None = None, record: Shapes | None = None
) -> Any:
    """Forward through all stages, and backward if the step returns something differentiable."""
    shapes = Shapes.of(graph) if shapes is None else shapes
    boundaries: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    received: tuple[Tensor, ...] = ()
    result = None
    with ExitStack() as stack:
        for wrappers in {id(stage.root): stage.replay.wrappers for stage in stages}.values():
            stack.enter_context(wrappers.active([graph]))
        for stage in stages:
            requires_grad = [shapes.values[value].requires_grad for value in stage.replay.plan.receives]
            inputs = tuple(map(_leaf, received, requires_grad))
            found = None if record is None else Shapes()
            received, result = run_stage(stage.replay, stage.step, inputs, shapes, SEED, made=found)
            if found is not None and record is not None:
                record.merge(found)
                shapes = record
            boundaries.append((inputs, received))
        _backward(result, boundaries)
    return result


def _leaf(received: Tensor, requires_grad: bool) -> Tensor:
    return received.detach().contiguous().clone().requires_grad_(requires_grad and torch.is_grad_enabled())


def _backward(result: Any, boundaries: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]) -> None:
    loss = loss_of(result)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
        for (_, sent), (inputs, _) in zip(reversed(boundaries[:-1]), reversed(boundaries[1:]), strict=True):
            pairs = [(s, i.grad) for s, i in zip(sent, inputs, strict=True) if s.requires_grad and i.grad is not None]
            if pairs:
                torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])


def loss_of(result: Any) -> Any:
    return result["loss"] if isinstance(result, dict) else result


def gradients(root: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}


def _buffers(root: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in root.named_buffers()}


def _put_back(root: nn.Module, buffers: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in root.named_buffers():
            buffer.copy_(buffers[name])


Cuts = Callable[[StepGraph], list[list[int]]]


def each_cut(graph: StepGraph) -> list[list[int]]:
    """Two stages, divided wherever a cut is allowed."""
    return [[cut] for cut in possible_cuts(graph)]


def in_stages(*counts: int) -> Cuts:
    """So many stages of about equally many units."""
    return lambda graph: [even_cuts(graph, count) for count in counts]


def stages_on(
    root: nn.Module, graph: StepGraph, cuts: Sequence[int], step: Step, checkpointing: How = False
) -> list[Stage]:
    """All stages on one module."""
    return [Stage(root, program(graph, plan, root, checkpointing), step) for plan in cut_into_stages(graph, cuts)]


def stages_apart(
    copies: Sequence[nn.Module],
    graph: StepGraph,
    cuts: Sequence[int],
    make_step: MakeStep,
    checkpointing: How,
) -> list[Stage]:
    """A stage on each copy of the module; parameters that a stage does not use are on the meta device."""
    stages = []
    for part, plan in zip(copies, cut_into_stages(graph, cuts), strict=True):
        mine = {name for item in graph.nodes[plan.begin : plan.end] for name in item.parameters}
        for name, parameter in list(part.named_parameters()):
            if name not in mine:
                set_contents(parameter, torch.empty_like(parameter, device="meta"))
                parameter.__class__ = AbsentParameter
        stages.append(Stage(part, program(graph, plan, part, checkpointing), make_step(part)))
    return stages


def assert_transparent(
    root: nn.Module,
    make_step: MakeStep,
    is_small: Callable[[str], bool],
    cuts: Cuts,
    tolerance: float = 1e-6,
    checkpointing: How = False,
) -> StepGraph:
    """Stages of the step give the loss, gradients and buffers that the whole step gives, with the same seed."""
    step, buffers = make_step(root), _buffers(root)
    graph = program_of(root, step, is_small)
    expected, wanted = _run_plainly(root, step)
    wanted_buffers = _buffers(root)
    all_cuts = cuts(graph)
    assert all_cuts, "nothing to cut"
    for places in all_cuts:
        root.zero_grad()
        _put_back(root, buffers)
        try:
            actual = loss_of(run_stages(graph, stages_on(root, graph, places, step, checkpointing)))
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(gradients(root), wanted, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(_buffers(root), wanted_buffers)
        except BaseException as error:
            error.add_note(f"cut before items {[(place, graph.nodes[place].name) for place in places]}")
            raise
    root.zero_grad()
    return graph


def assert_transparent_apart(
    root: nn.Module,
    make_step: MakeStep,
    is_small: Callable[[str], bool],
    num_stages: int,
    tolerance: float = 1e-6,
    checkpointing: How = False,
) -> list[Stage]:
    """As :func:`assert_transparent`, each stage with its own parameters only."""
    copies = [copy.deepcopy(root) for _ in range(num_stages)]
    graph = program_of(root, make_step(root), is_small)
    expected, wanted = _run_plainly(root, make_step(root))
    stages = stages_apart(copies, graph, even_cuts(graph, num_stages), make_step, checkpointing)
    actual = loss_of(run_stages(graph, stages))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    summed: dict[str, Tensor] = {}
    for stage in stages:
        for name, gradient in gradients(stage.root).items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    torch.testing.assert_close(summed, wanted, rtol=tolerance, atol=tolerance)
    return stages


def _run_plainly(root: nn.Module, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    with plainly(root):
        loss: Tensor = loss_of(step())
        loss.backward()
    return loss, gradients(root)
