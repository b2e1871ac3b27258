"""Seconds and bytes of each node of a step: what a partition is judged by."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.boundaries import boundary_bytes, possible_cuts
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.tracer import Clock, Instant, Step
from lightning_smddp.pipeline.partition.resources import Resources
from lightning_smddp.planner.problem import NodeCost, PartitionProblem
from lightning_smddp.wire.pytree import tensors

LossIn: TypeAlias = Callable[[Any], Tensor | None]
"""The loss in what a step returned; None if there is none."""

_BACKWARD_OF_FORWARD = 2.0  # time of a backward where only the forward was measured


@dataclass(frozen=True)
class NodeTimes:
    """Seconds of each node for one micro-batch."""

    forward: list[float]
    backward: list[float]

    @classmethod
    def of_trace(cls, graph: StepGraph) -> NodeTimes:
        """As traced, forward only; backward is a multiple of it."""
        forward = [node.seconds for node in graph.nodes]
        return cls(forward, [_BACKWARD_OF_FORWARD * seconds for seconds in forward])


def problem_of(graph: StepGraph, resources: Resources, times: NodeTimes, checkpointing: bool) -> PartitionProblem:
    """What the partition has to solve."""
    costs = []
    for node in graph.nodes:
        forward, backward = times.forward[node.index], times.backward[node.index]
        is_unit = node.module is not None
        kept = node.activation_bytes
        if checkpointing and is_unit:  # its forward runs again in the backward, and nothing is kept in between
            backward += forward
            kept = 0
        costs.append(NodeCost(node.name, forward, backward, kept, node.parameters, is_unit))
    cut_bytes = [math.inf] * (len(costs) + 1)
    for cut in possible_cuts(graph):
        cut_bytes[cut] = boundary_bytes(graph, cut)
    return PartitionProblem(
        nodes=_evened(costs, graph, resources),
        parameter_bytes=resources.parameter_bytes,
        cut_bytes=cut_bytes,
        rank_of_stage=resources.rank_of_stage,
        in_flight=resources.in_flight,
        memory_limit=resources.memory_limit,
        links=resources.links,
    )


def _evened(costs: list[NodeCost], graph: StepGraph, resources: Resources) -> list[NodeCost]:
    """The same times for layers of one kind: one measurement of each may be cold, or disturbed.

    Layers are of one kind if their names differ in numbers only, and parameters, activations and outputs are as large.
    """
    kinds: dict[Hashable, list[int]] = defaultdict(list)  # indices of the nodes of each kind
    for node, cost in zip(graph.nodes, costs, strict=True):
        name: str | int = node.index  # an operation between units is of no kind
        if node.module is not None:
            name = re.sub(r"\d+", "#", node.name)  # "blocks.3.mlp" is as "blocks.4.mlp"
        sizes = [resources.parameter_bytes.get(parameter, 0) for parameter in node.parameters]
        shapes = [graph.values[value].shape for value in node.outputs]
        kinds[name, tuple(sizes), tuple(shapes), cost.activation_bytes].append(node.index)
    evened = list(costs)
    for alike in kinds.values():
        forward = median(costs[index].forward_s for index in alike)
        backward = median(costs[index].backward_s for index in alike)
        for index in alike:
            evened[index] = replace(costs[index], forward_s=forward, backward_s=backward)
    return evened


# ---- a timed run -----------------------------------------------------------------------------------------------------


def time_nodes(graph: StepGraph, step: Step, loss_of: LossIn, root: nn.Module, device: torch.device) -> NodeTimes:
    """Run the step once, forward, and backward if it has a loss; no gradients stay.

    Units are timed. Operations between them are so short that their forward is taken from the trace, and their backward
    counts with the unit behind them.
    """
    watch = _UnitWatch(Clock(device))
    with _dropped_gradients(root), watch.on({name: root.get_submodule(name) for name in graph.units}):
        loss = loss_of(step())
        if loss is not None and loss.requires_grad:
            watch.enter(None)
            loss.backward()
            watch.leave()
    calls = Counter(node.module for node in graph.nodes)
    traced = NodeTimes.of_trace(graph)
    forward, backward = [], []
    for node in graph.nodes:
        if node.module is None:
            forward.append(node.seconds)
            backward.append(0.0)
        elif node.module in watch.forward:
            forward.append(watch.forward[node.module] / calls[node.module])
            backward.append(watch.backward[node.module] / calls[node.module])
        else:  # its `forward` was called, and no hooks
            forward.append(traced.forward[node.index])
            backward.append(traced.backward[node.index])
    backward[-1] += watch.backward[None]
    return NodeTimes(forward, backward)


class _UnitWatch:
    """Seconds of units by name, of all their calls together.

    Gradients reach a unit's results when the backward of all behind it is done: from then on the time is the unit's,
    until they reach another one's. What comes before the first is that of None.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.forward: dict[str | None, float] = defaultdict(float)
        self.backward: dict[str | None, float] = defaultdict(float)
        self._begun: list[Instant] = []  # calls of units that are in calls of others
        self._running: tuple[Instant, str | None] | None = None  # backward: since when, which unit

    @contextmanager
    def on(self, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watch their calls."""
        with ExitStack() as handles:
            for name, unit in units.items():
                begins = unit.register_forward_pre_hook(lambda *_: self._begun.append(self.clock.now()), prepend=True)
                ends = unit.register_forward_hook(partial(self._ends, name))
                handles.callback(begins.remove)
                handles.callback(ends.remove)
            with torch.compiler.set_stance("force_eager"):  # to compile it anew for the hooks takes long
                yield

    def _ends(self, name: str, unit: nn.Module, arguments: Any, result: Any) -> None:
        begun = self._begun.pop()
        if self._begun:
            return
        self.forward[name] += begun.until(self.clock.now())
        # A hook on the gradient of each of its results: the first that fires is when its backward begins.
        for tensor in tensors(result):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: self.enter(name))

    def enter(self, name: str | None) -> None:
        """The backward of this unit begins."""
        self.leave()
        self._running = (self.clock.now(), name)

    def leave(self) -> None:
        """The time since then is that of the unit that has been running."""
        if self._running is not None:
            since, name = self._running
            self.backward[name] += since.until(self.clock.now())
            self._running = None


@contextmanager
def _dropped_gradients(root: nn.Module) -> Iterator[None]:
    """The whole model's gradients may be too much for one rank."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    with ExitStack() as handles:
        for parameter in root.parameters():
            if parameter.requires_grad:
                handles.callback(parameter.register_post_accumulate_grad_hook(drop).remove)
        yield
