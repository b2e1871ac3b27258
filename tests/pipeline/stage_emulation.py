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

from lightning_smddp.pipeline.capture.boundaries import boundary_values, possible_cuts
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.tracer import trace
from lightning_smddp.pipeline.runtime.remote import Shapes
from lightning_smddp.pipeline.runtime.stage_program import Observers, StagePlan, StageProgram
from lightning_smddp.pipeline.runtime.step_run import run_stage
from lightning_smddp.pipeline.runtime.wrappers import Wrappers
from lightning_smddp.pipeline.state.meta_parameters import AbsentParameter, set_contents
from lightning_smddp.seeding import Generators, seeded_modules

CPU = torch.device("cpu")
SEED = 7
Step = Callable[[], Any]
_wrappers: weakref.WeakKeyDictionary[nn.Module, Wrappers] = weakref.WeakKeyDictionary()


def wrappers_of(root: nn.Module) -> Wrappers:
    return _wrappers.setdefault(root, Wrappers(root, CPU))


def program(graph: StepGraph, plan: StagePlan, root: nn.Module, checkpointing: bool = False) -> StageProgram:
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
    return build_graph(record, Modules(record, root), is_small)


def even_cuts(graph: StepGraph, num_stages: int) -> list[int]:
    """Cuts in stages of about equally many units, where cuts are allowed."""
    places = possible_cuts(graph)
    return sorted({places[len(places) * stage // num_stages] for stage in range(1, num_stages)})


def plans_of(graph: StepGraph, cuts: Sequence[int]) -> list[StagePlan]:
    live, again = boundary_values(graph, cuts)
    bounds, received, sent = [0, *cuts, len(graph.nodes)], [(), *live], [*live, ()]
    return [StagePlan(s, bounds[s], bounds[s + 1], again[s], received[s], sent[s]) for s in range(len(bounds) - 1)]


def split(
    root: nn.Module, step: Step, is_small: Callable[[str], bool], cuts: Sequence[int] | int
) -> tuple[StepGraph, list[StageProgram]]:
    """Trace ``step`` and cut it before the items ``cuts``, or in ``cuts`` stages of about equally many units."""
    graph = program_of(root, step, is_small)
    cuts = even_cuts(graph, cuts) if isinstance(cuts, int) else cuts
    return graph, [program(graph, plan, root) for plan in plans_of(graph, cuts)]


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
            received, result = run_stage(stage.replay, stage.step, inputs, shapes, Observers(shapes=found), SEED)
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


def run(root: nn.Module, graph: StepGraph, replays: list[StageProgram], step: Step) -> Any:
    """All stages on one module."""
    return run_stages(graph, [Stage(root, replay, step) for replay in replays])


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


def assert_transparent(
    root: nn.Module,
    make_step: Callable[[nn.Module], Step],
    is_small: Callable[[str], bool],
    cuts: Sequence[int] | int,
    tolerance: float = 1e-6,
) -> tuple[StepGraph, list[StageProgram]]:
    """The stages of the step give the loss, gradients and buffers that the whole step gives, with the same seed."""
    reference = copy.deepcopy(root)
    with plainly(reference):
        expected = make_step(reference)()
        loss = loss_of(expected)
        loss.backward()
    step = make_step(root)
    buffers = _buffers(root)
    graph, replays = split(root, step, is_small, cuts)
    for _ in range(2):  # the second time as the first
        root.zero_grad()
        _put_back(root, buffers)
        actual = loss_of(run(root, graph, replays, step))
        torch.testing.assert_close(actual, loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradients(root), gradients(reference), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dict(root.named_buffers()), dict(reference.named_buffers()))
    return graph, replays


def assert_every_cut(
    root: nn.Module,
    make_step: Callable[[nn.Module], Step],
    is_small: Callable[[str], bool],
    tolerance: float = 1e-6,
) -> StepGraph:
    """At every position where a cut is allowed, two stages give what the whole step gives."""
    reference = copy.deepcopy(root)
    with plainly(reference):
        expected = loss_of(make_step(reference)())
        expected.backward()
    step, buffers = make_step(root), _buffers(root)
    graph = program_of(root, step, is_small)
    assert possible_cuts(graph), "nothing to cut"
    for cut in possible_cuts(graph):
        root.zero_grad()
        _put_back(root, buffers)
        replays = [program(graph, plan, root) for plan in plans_of(graph, [cut])]
        try:
            actual = loss_of(run(root, graph, replays, step))
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(gradients(root), gradients(reference), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(dict(root.named_buffers()), dict(reference.named_buffers()))
        except BaseException as error:
            error.add_note(f"cut before item {cut}: {graph.nodes[cut].name}")
            raise
    return graph


def apart(
    root: nn.Module,
    make_step: Callable[[nn.Module], Step],
    graph: StepGraph,
    cuts: Sequence[int],
    checkpointing: bool = False,
) -> list[Stage]:
    """Stages on copies of ``root`` of their own; parameters that a stage does not use are on the meta device."""
    stages = []
    for plan in plans_of(graph, cuts):
        mine = {name for item in graph.nodes[plan.begin : plan.end] for name in item.parameters}
        part = copy.deepcopy(root)
        for name, parameter in list(part.named_parameters()):
            if name not in mine:
                set_contents(parameter, torch.empty_like(parameter, device="meta"))
                parameter.__class__ = AbsentParameter
        stages.append(Stage(part, program(graph, plan, part, checkpointing), make_step(part)))
    return stages


def assert_transparent_apart(
    root: nn.Module,
    make_step: Callable[[nn.Module], Step],
    is_small: Callable[[str], bool],
    num_stages: int,
    tolerance: float = 1e-6,
    checkpointing: bool = False,
) -> list[Stage]:
    """As :func:`assert_transparent`, each stage with its own parameters only."""
    reference = copy.deepcopy(root)
    with plainly(reference):
        expected = loss_of(make_step(reference)())
        expected.backward()
    traced = copy.deepcopy(root)
    graph = program_of(traced, make_step(traced), is_small)
    stages = apart(root, make_step, graph, even_cuts(graph, num_stages), checkpointing)
    assert len(stages) == num_stages
    actual = loss_of(run_stages(graph, stages))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    summed: dict[str, Tensor] = {}
    for stage in stages:
        for name, gradient in gradients(stage.root).items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    torch.testing.assert_close(summed, gradients(reference), rtol=tolerance, atol=tolerance)
    return stages
