"""From a whole model and its first batch to stages: traced on every rank, decided by the first, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph, first_difference
from lightning_smddp.pipeline.capture.graph_builder import IsSmall, build_graph
from lightning_smddp.pipeline.capture.preserve_state import kept_parameters, preserve_state
from lightning_smddp.pipeline.capture.records import Modules, Trace
from lightning_smddp.pipeline.capture.tracer import Fetch, Step, trace
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.partition.assignment import homes_of, ownership_of
from lightning_smddp.pipeline.partition.costs import LossIn, NodeTimes, time_nodes
from lightning_smddp.pipeline.partition.cuts import StageCuts
from lightning_smddp.pipeline.partition.hardware import explained_shortage
from lightning_smddp.pipeline.partition.on_all_ranks import OnAllRanks, decided_by_first
from lightning_smddp.pipeline.partition.resources import Resources
from lightning_smddp.pipeline.partition.split import choose_units, is_within, partition
from lightning_smddp.planner.partition import Partition
from lightning_smddp.wire.objects import gather


@dataclass(frozen=True)
class PartitionPlan:
    """How a model was divided.

    Attributes:
        graph, stage_cuts: the step that it was divided by.
        ownership: which pipeline ranks hold which parameters.
        homes: for each parameter the stages that use it.
        times: of the graph's nodes.
        stage_seconds, stage_memory: predicted, forward and backward of a micro-batch; bytes.
        decision: what the first rank decided, by times that it measured, in JSON.
    """

    graph: StepGraph
    stage_cuts: StageCuts
    ownership: Ownership
    homes: Mapping[str, tuple[int, ...]]
    times: NodeTimes
    stage_seconds: tuple[float, ...]
    stage_memory: tuple[int, ...]
    decision: Mapping[str, Any]

    @property
    def stage_of_node(self) -> list[int]:
        """The stage of each node of the graph."""
        return [stage for stage, _ in self.stage_cuts.nodes_by_stage(self.graph)]

    @property
    def is_exact(self) -> bool:
        """Whether all floating-point values of the step have at least 32 bits."""
        return all(value.dtype.itemsize >= 4 for value in self.graph.values if value.dtype.is_floating_point)


@dataclass(frozen=True)
class Trial:
    """A step to run for nothing, on one micro-batch.

    Attributes:
        traced: runs it.
        loss_of: the loss in what the step returned; None if there is none.
        fetch: gives the first values of a parameter that has no memory yet. None: all have.
    """

    traced: Step
    loss_of: LossIn
    fetch: Fetch | None = None


def record(
    step: Step,
    root: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup,
    fetch: Fetch | None = None,
) -> Trace:
    """Trace ``step`` on every rank; see :func:`trace`. Collective: an error on one rank is raised on all."""
    together = OnAllRanks(group)

    def fetch_together(name: str) -> Tensor:
        assert fetch is not None
        together.check(f"parameter {name!r}")
        return fetch(name)

    is_whole = fetch is None
    borrow = None
    if not is_whole:
        borrow = fetch_together

    def attempt() -> Trace:
        with explained_shortage(is_whole), preserve_state(root, device), kept_parameters(root) as foreign:
            traced = trace(step, root, device, borrow)
            traced.foreign_writes = tuple(foreign.locations())
            return traced

    return together.run(attempt)


def build_on_all(
    traced: Trace,
    modules: Modules,
    is_small: IsSmall,
    group: dist.ProcessGroup,
) -> StepGraph:
    """:func:`build_graph` on every rank. Collective: an error on one rank is raised on all."""
    return OnAllRanks(group).run(lambda: build_graph(traced, modules, is_small))


def divide(
    trial: Trial,
    root: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup,
    resources: Resources,
    split: Sequence[str] | None,
    checkpointing: bool,
    known: Mapping[str, Any] | None = None,
) -> PartitionPlan:
    """Find out how to divide ``root`` by a step. Collective over all ranks; nothing of the model changes.

    ``known`` is an earlier ``decision``, the same on all ranks. It is kept if the step is still the same, so that a
    resumed run has the same stages; else, and where ``split`` is given, it counts for nothing.

    Raises:
        SplitError: on every rank, when the step cannot be divided so; the message says why and what to do.
    """
    traced = record(trial.traced, root, device, group, trial.fetch)
    modules = Modules(traced, root)
    if split is not None or (known is not None and len(known["stage_seconds"]) != resources.num_stages):
        known = None
    graph = _graph_of(known, traced, modules, root) if known is not None else None
    # The step may be another one than that which an earlier decision was made for: then it is decided anew, by all.
    if not all(gather(graph is not None, group)):
        graph = None
    if graph is None:
        known = None

        def choose() -> tuple[str, ...]:
            return choose_units(traced, modules, resources, split, checkpointing).units

        units = decided_by_first(choose, group)
        graph = build_on_all(traced, modules, is_within(units), group)
    require_same(graph, group)

    def decide() -> dict[str, Any]:
        times = _measure(graph, trial, root, device)
        if known is not None:
            decision = dict(known)
        else:
            found = partition(graph, resources, times, split, checkpointing)
            decision = _decision(graph, found)
        decision["times"] = asdict(times)
        return decision

    # Measured times differ between ranks, and with them the best cuts. So one rank decides, and all work out from its
    # words, plain data, what follows: graph, homes and owners are the same functions of the same values everywhere.
    decision = decided_by_first(decide, group)
    return _plan_of(decision, graph, root, resources)


def _measure(
    graph: StepGraph,
    trial: Trial,
    root: nn.Module,
    device: torch.device,
) -> NodeTimes:
    """By a run of the whole step on this rank; the trace's times where it has not the whole model."""
    if trial.fetch is not None:
        return NodeTimes.of_trace(graph)
    # Parameters are copied, to be put back, only where the step was seen to change something that lasts.
    kept: AbstractContextManager[object] = kept_parameters(root) if graph.once_a_batch else nullcontext()
    with explained_shortage(is_whole=True), preserve_state(root, device), kept:
        return time_nodes(graph, trial.traced, trial.loss_of, root, device)


def _plan_of(
    decision: dict[str, Any],
    graph: StepGraph,
    root: nn.Module,
    resources: Resources,
) -> PartitionPlan:
    """What follows from a decision, the same on every rank; measurements are taken out of it."""
    times = NodeTimes(**decision.pop("times"))
    stage_cuts = StageCuts.at(graph, decision["splitting"]["cuts"])
    homes = homes_of(graph, stage_cuts, [name for name, _ in root.named_parameters()])
    buffers = [name for name, _ in root.named_buffers()]
    return PartitionPlan(
        graph=graph,
        stage_cuts=stage_cuts,
        ownership=ownership_of(graph, stage_cuts, homes, resources, buffers),
        homes=homes,
        times=times,
        stage_seconds=tuple(decision["stage_seconds"]),
        stage_memory=tuple(decision["stage_memory"]),
        decision=decision,
    )


def _decision(graph: StepGraph, found: Partition) -> dict[str, Any]:
    """What is decided of a step, in JSON. Checkpoints keep it, so keys stay as they are."""
    return {
        "splitting": StageCuts.at(graph, found.cuts).to_json(),
        "stage_seconds": found.stage_seconds,
        "stage_memory": found.stage_memory,
        "digest": graph.digest(),
    }


def _graph_of(
    known: Mapping[str, Any],
    traced: Trace,
    modules: Modules,
    root: nn.Module,
) -> StepGraph | None:
    """The step's graph with the units of an earlier decision, if it is the one that was decided on."""
    # Units whose modules are gone make no graph; equal ones may make another graph, as the code may have changed.
    units = known["splitting"]["units"]
    if not dict(root.named_modules()).keys() >= set(units):
        return None
    try:
        graph = build_graph(traced, modules, is_within(units))
    except SplitError:
        return None
    return graph if graph.digest() == known["digest"] else None


def require_same(graph: StepGraph, group: dist.ProcessGroup) -> None:
    """Raise ``SplitError`` on every rank if the step took another course on one of them. Collective.

    The same where it writes foreign tensors on one. From then on all ranks agree on whether it draws random numbers
    in Python.
    """
    gathered = gather([graph.digest(), graph.draws, graph.foreign_writes], group)
    graph.draws = any(draws for _, draws, _ in gathered)
    for _, _, locations in gathered:
        refuse_foreign_writes(locations)
    # A short digest first. Only where one differs do all ranks, which know that alike, send their lines for a message.
    differing = [rank for rank, (digest, _, _) in enumerate(gathered) if digest != gathered[0][0]]
    if not differing:
        return
    other = differing[0]
    lines = gather(graph.lines(), group)
    position, first, second = first_difference(lines[0], lines[other])
    raise SplitError(
        f"The step takes another course on rank {other} than on rank 0: its item {position} is {second}, on rank 0 it "
        f"is {first}. Control flow may depend neither on the rank nor on random numbers."
    )


def refuse_foreign_writes(locations: Sequence[str]) -> None:
    """Raise ``SplitError`` if a step writes tensors in place that were there before it (``file:line`` of each)."""
    if locations:
        raise SplitError(
            f"The step writes a tensor in place at {locations[0]} that was there before it: in a callback, a layer, a "
            "list, another object or a global variable. Stages would write it for each micro-batch, and not on all "
            "ranks. Keep it in an attribute of the LightningModule itself, with memory of its own, or assign a new one."
        )
