"""The whole step on one rank: what the pipeline has to agree with, and what each node costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.clock import Clock, Instant
from lightning_smddp.pipeline.capture.graph import Node, StepGraph
from lightning_smddp.pipeline.capture.own_seeds import seed_torch
from lightning_smddp.pipeline.capture.tracer import Step
from lightning_smddp.pipeline.partition.live_sets import live_sets
from lightning_smddp.pipeline.partition.verify import norm_of
from lightning_smddp.pipeline.runtime.remote import Shapes
from lightning_smddp.pipeline.runtime.replay import Observer, Observers, Replay, patched_units
from lightning_smddp.pipeline.runtime.stage_graph import StagePlan
from lightning_smddp.wire.pytree import tensors

LossIn: TypeAlias = Callable[[Any], Tensor | None]
"""The loss in what a step returned; None if there is none."""


@dataclass
class Reference:
    """One micro-batch's loss, the norm of each parameter's gradient, and seconds of each node.

    ``plain_loss`` and ``plain_norms`` are those of the step as the user wrote it, not replayed; ``again_loss`` and
    ``again_norms`` of a replay with the same random numbers.
    ``of_trace``: it is the micro-batch that was traced, as the other one takes another course.
    """

    loss: float
    norms: dict[str, float] = field(default_factory=dict)
    plain_loss: float = float("nan")
    plain_norms: dict[str, float] = field(default_factory=dict)
    again_loss: float = float("nan")
    again_norms: dict[str, float] = field(default_factory=dict)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    of_trace: bool = False


def run_reference(
    graph: StepGraph,
    step: Step,
    loss_of: LossIn,
    root: nn.Module,
    device: torch.device,
    seed: int,
    own_numbers: bool = True,
) -> Reference:
    """Run the step, units patched, in one stage: forward, and backward if it has a loss. Gradients are not kept.

    Each node starts from its own random numbers, as in :func:`seeding`, so that other ranks can draw the same; without
    ``own_numbers`` it goes on with those that the nodes before it have left, as in :func:`run_plain`.
    """
    # One stage that has all nodes: nothing is received, and nothing is sent.
    live, again = live_sets(graph, [])
    assert not live
    plan = StagePlan(0, 0, len(graph.nodes), again[0], (), ())
    replay = Replay(graph, plan, root, device)
    observer = None
    if own_numbers:
        observer = seeding(seed)
    else:
        replay.python_random = None  # what units draw in Python, too
    times = _NodeTimes(len(graph.nodes), device, observer)
    seed_torch(seed)

    def replayed() -> Any:
        with patched_units(root, graph.units):
            _, result = replay.run(step, (), Shapes.of(graph), Observers(times.observe))
        return result

    loss, norms = _backward(replayed, loss_of, root, times)
    return Reference(loss, norms, forward_seconds=times.forward, backward_seconds=times.backward)


def run_plain(
    step: Step,
    loss_of: LossIn,
    root: nn.Module,
    device: torch.device,
    seed: int,
) -> tuple[float, dict[str, float]]:
    """The same of the step as it is, with nothing patched: what a replay may change shows by it."""
    seed_torch(seed)
    return _backward(step, loss_of, root, _NodeTimes(0, device, None))


def _backward(
    step: Step,
    loss_of: LossIn,
    root: nn.Module,
    times: _NodeTimes,
) -> tuple[float, dict[str, float]]:
    """Forward, and backward if there is a loss: the loss, and norms of gradients."""
    norms: dict[str, float] = {}
    handles = []
    for name, parameter in root.named_parameters():
        if parameter.requires_grad and not parameter.is_meta:
            handles.append(parameter.register_post_accumulate_grad_hook(_note_norm(name, norms)))
    try:
        loss = loss_of(step())
        if loss is not None and loss.requires_grad:
            times.backward_begins()
            loss.backward()
            times.backward_ends()
    finally:
        for handle in handles:
            handle.remove()
    if loss is None:
        return math.nan, norms
    return float(loss.detach()), norms


def fastest(references: Sequence[Reference]) -> Reference:
    """The first reference, with the shortest time of each node: one run alone may be cold, or disturbed.

    Of the second, which drew its random numbers as a plain step does, loss and norms are kept too.
    """
    first, again = references[:2]
    forward = [run.forward_seconds for run in references]
    backward = [run.backward_seconds for run in references]
    return Reference(
        first.loss,
        first.norms,
        again_loss=again.loss,
        again_norms=again.norms,
        forward_seconds=[min(times) for times in zip(*forward, strict=True)],
        backward_seconds=[min(times) for times in zip(*backward, strict=True)],
    )


def seeding(seed: int) -> Callable[[Node, bool, Any], None]:
    """Observer that gives each node random numbers of its own, whatever ran before it."""

    def observe(node: Node, ends: bool, result: Any) -> None:
        if not ends:
            seed_torch(seed + node.index)

    return observe


def _note_norm(name: str, norms: dict[str, float]) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms[name] = norm_of(parameter.grad)
        parameter.grad = None  # the whole model's gradients may be too much for one rank

    return note


class _NodeTimes:
    """Seconds of nodes, forward and backward.

    Gradients reach a node's results when the backward of all behind it is done: from then on the time is the node's,
    until they reach another one's.
    """

    def __init__(self, count: int, device: torch.device, seed: Observer | None) -> None:
        self.clock = Clock(device)
        self.seed = seed
        self.forward = [0.0] * count
        self.backward = [0.0] * count
        self.started = self.clock.now()
        self.running: tuple[Instant, int] | None = None  # backward: since when, which node

    def observe(self, node: Node, ends: bool, result: Any) -> None:
        if not ends:
            if self.seed is not None:
                self.seed(node, ends, result)
            self.started = self.clock.now()
            return
        self.forward[node.index] += self.started.until(self.clock.now())
        # A hook on the gradient of each of its results: the first that fires is when the node's backward begins.
        enter = partial(self._backward_enters, node.index)
        for tensor in tensors(result):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(enter)

    def backward_begins(self) -> None:
        self.running = None

    def backward_ends(self) -> None:
        self._charge()

    def _backward_enters(self, index: int, gradient: Tensor) -> None:
        self._charge()
        self.running = (self.clock.now(), index)

    def _charge(self) -> None:
        """To the node that has been running, the time since then."""
        if self.running is not None:
            since, index = self.running
            self.backward[index] += since.until(self.clock.now())
