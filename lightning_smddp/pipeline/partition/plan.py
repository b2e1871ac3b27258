"""From a whole model and its first batch to stages: traced on every rank, decided by the first, the same everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.graph import Modules, Node, SplitError, StepGraph, build_graph
from lightning_smddp.pipeline.capture.preserve_state import kept_parameters, preserve_state
from lightning_smddp.pipeline.capture.records import Trace
from lightning_smddp.pipeline.capture.tracer import trace
from lightning_smddp.pipeline.partition.cuts import (
    Resources,
    StageCuts,
    choose_units,
    homes_of,
    is_within,
    neighbour_stage,
    partition,
)
from lightning_smddp.pipeline.partition.ownership import Ownership
from lightning_smddp.pipeline.partition.reference import Reference, fastest, run_plain, run_reference
from lightning_smddp.pipeline.partition.room import explained_shortage
from lightning_smddp.pipeline.runtime.own_dropout import without_own_dropout
from lightning_smddp.pipeline.runtime.replay import ReplayError
from lightning_smddp.pipeline.runtime.together import StepFailedError, Together
from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.gather import gather_json

CHECK_SEED = 20240229
_REFERENCE_RUNS = 3  # of one micro-batch, for its times


def own_error(error: Exception) -> BaseException:
    """What the user's code raised here, if it is that."""
    if isinstance(error, StepFailedError) and error.__cause__ is not None:
        return error.__cause__
    return error


@dataclass(frozen=True)
class PartitionPlan:
    """How a model was divided.

    Attributes:
        graph, stage_cuts: the step that it was divided by.
        ownership: which pipeline ranks hold which parameters.
        homes: for each parameter the stages that use it.
        reference: the first rank's run of the whole step, or None if that was not possible.
        stage_seconds, stage_memory: predicted, forward and backward of a micro-batch; bytes.
        decision: what the first rank decided, by times that it measured, in JSON.
    """

    graph: StepGraph
    stage_cuts: StageCuts
    ownership: Ownership
    homes: Mapping[str, tuple[int, ...]]
    reference: Reference | None
    stage_seconds: tuple[float, ...]
    stage_memory: tuple[int, ...]
    decision: Mapping[str, Any]

    @property
    def stage_of_item(self) -> list[int]:
        """The stage of each node of the graph."""
        plans = self.stage_cuts.plans(len(self.graph.nodes))
        return [next(p.stage for p in plans if p.begin <= node.index < p.end) for node in self.graph.nodes]


@dataclass(frozen=True)
class Trial:
    """A step to run for nothing: on one micro-batch for the trace, on another for the reference.

    They should differ, so that what is left over from one is not right for the other. Where the other one takes another
    course, the traced one is the reference, too.
    """

    traced: Callable[[], Any]
    referred: Callable[[], Any]
    loss_of: Callable[[Any], Tensor | None]


def record(
    step: Callable[[], Any],
    root: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup,
    fetch: Callable[[str], Tensor] | None = None,
) -> Trace:
    """Trace ``step`` on every rank; see :func:`trace`. Collective: an error on one rank is raised on all."""
    together = Together(group, device)

    def fetch_together(name: str) -> Tensor:
        assert fetch is not None
        together.meet(f"parameter {name!r}")
        return fetch(name)

    def attempt() -> Trace:
        with explained_shortage(fetch is None), preserve_state(root, device), kept_parameters(root) as foreign:
            traced = trace(step, root, device, None if fetch is None else fetch_together)
            traced.foreign_writes = tuple(foreign.locations())
            return traced

    return together.run(attempt)


def build_on_all(
    traced: Trace, modules: Modules, is_small: Callable[[str], bool], group: dist.ProcessGroup, device: torch.device
) -> StepGraph:
    """:func:`build_graph` on every rank. Collective: an error on one rank is raised on all."""
    return Together(group, device).run(lambda: build_graph(traced, modules, is_small))


def divide(
    trial: Trial,
    root: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup,
    resources: Resources,
    split: Sequence[str] | None,
    checkpointing: bool,
    with_reference: bool,
    fetch: Callable[[str], Tensor] | None = None,
    known: Mapping[str, Any] | None = None,
) -> PartitionPlan:
    """Find out how to divide ``root`` by a step. Collective over all ranks; nothing of the model changes.

    ``known`` is an earlier ``decision``, the same on all ranks. It is kept if the step is still the same, so that a
    resumed run has the same stages; else, and where ``split`` is given, it counts for nothing.

    Raises:
        SplitError: on every rank, when the step cannot be divided so; the message says why and what to do.
    """
    traced = record(trial.traced, root, device, group, fetch)
    modules = Modules(traced, root)
    graph = _known_program(known if split is None else None, traced, modules, root, group, device)
    if graph is None or known is None or len(known["stage_seconds"]) != resources.num_stages:
        units = first_decides(
            lambda: choose_units(traced, modules, resources, split, checkpointing).units, group, device
        )
        graph, known = build_on_all(traced, modules, is_within(units), group, device), None
    require_same(graph, group, device)

    def decide() -> dict[str, Any]:
        with explained_shortage(is_whole=True), without_own_dropout(root, device):
            reference = _refer(graph, trial, root, device) if with_reference else None
        measured = None if reference is None else asdict(reference)
        if known is not None:
            return {**known, "reference": measured}
        found = partition(graph, resources, reference, split, checkpointing)
        return {
            "splitting": StageCuts.at(graph, found.cuts).to_json(),
            "reference": measured,
            "stage_seconds": found.stage_seconds,
            "stage_memory": found.stage_memory,
            "digest": _digest(graph.digest()),
        }

    decided = first_decides(decide, group, device)
    stage_cuts = StageCuts.from_json(decided["splitting"])
    reference = None if decided["reference"] is None else Reference(**decided["reference"])
    homes = homes_of(graph, stage_cuts, [name for name, _ in root.named_parameters()])
    return PartitionPlan(
        graph,
        stage_cuts,
        ownership_of(graph, stage_cuts, homes, resources, [name for name, _ in root.named_buffers()]),
        homes,
        reference,
        tuple(decided["stage_seconds"]),
        tuple(decided["stage_memory"]),
        {key: value for key, value in decided.items() if key != "reference"},
    )


def _refer(graph: StepGraph, trial: Trial, root: nn.Module, device: torch.device) -> Reference:
    """The whole step on one micro-batch, a few times: the fastest run; and once as it is, without replay."""
    kept = kept_parameters if graph.once_a_batch else nullcontext

    def refer(step: Callable[[], Any], own_numbers: bool) -> Reference:
        with preserve_state(root, device), kept(root):
            return run_reference(graph, step, trial.loss_of, root, device, CHECK_SEED, own_numbers)

    step, of_trace = trial.referred, False
    try:
        runs = [refer(step, True)]
    except ReplayError:  # it takes another course
        step, of_trace = trial.traced, True
        runs = [refer(step, True)]
    try:
        again = refer(step, False)
    except ReplayError:
        if not graph.shares_draws:
            raise
        again = None  # with other random numbers it takes another course: a plain run shows nothing
    runs += [runs[0] if again is None else again]
    runs += [refer(step, True) for _ in range(2, _REFERENCE_RUNS)]
    reference = replace(fastest(runs), of_trace=of_trace)
    if again is None:
        reference.plain_loss, reference.plain_norms = reference.again_loss, reference.again_norms
        return reference
    with preserve_state(root, device), kept(root):
        plain = run_plain(step, trial.loss_of, root, device, CHECK_SEED)
    reference.plain_loss, reference.plain_norms = plain
    return reference


def _known_program(
    known: Mapping[str, Any] | None,
    traced: Trace,
    modules: Modules,
    root: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
) -> StepGraph | None:
    """:func:`_program_of` if it is one on all ranks, which go the same way from there. Collective."""
    graph = None if known is None else _program_of(known, traced, modules, root)
    return graph if all(gather_json(graph is not None, group, device)) else None


def _program_of(known: Mapping[str, Any], traced: Trace, modules: Modules, root: nn.Module) -> StepGraph | None:
    """The step's graph with the units of an earlier decision, if it is the one that was decided on."""
    units = known["splitting"]["units"]
    if not set(units) <= {name for name, _ in root.named_modules()}:
        return None
    try:
        graph = build_graph(traced, modules, is_within(units))
    except SplitError:
        return None
    return graph if _digest(graph.digest()) == known["digest"] else None


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def ownership_of(
    graph: StepGraph,
    stage_cuts: StageCuts,
    homes: Mapping[str, Sequence[int]],
    resources: Resources,
    all_buffers: Sequence[str] = (),
) -> Ownership:
    """Ranks instead of stages.

    A buffer that the step changes belongs to the rank of the node that does. Others may be changed by a later step (a
    BatchNorm that is unfrozen): they belong to where they are read, else to where parameters near them are.
    """
    ranks = resources.rank_of_stage
    buffers: dict[str, int] = {}
    for plan in stage_cuts.plans(len(graph.nodes)):
        for node in graph.nodes[plan.begin : plan.end]:
            for name in node.buffers:
                other = buffers.setdefault(name, ranks[plan.stage])
                if other != ranks[plan.stage]:
                    raise SplitError(
                        f"Buffer {name!r} is changed on ranks {other} and {ranks[plan.stage]} of the pipeline: the "
                        "module that changes it is called in several stages. Cut elsewhere by `split=`."
                    )
    units = {node.module: stage for node, stage in _placed_nodes(graph, stage_cuts) if node.module is not None}
    for name in all_buffers:
        inside = [stage for unit, stage in units.items() if name.startswith(f"{unit}.")]
        stage = inside[0] if inside else neighbour_stage(name, homes)
        buffers.setdefault(name, ranks[stage])
    parameters = {name: tuple(dict.fromkeys(ranks[s] for s in stages)) for name, stages in homes.items()}
    return Ownership(parameters, buffers, max(ranks) + 1)


def _placed_nodes(graph: StepGraph, stage_cuts: StageCuts) -> Iterator[tuple[Node, int]]:
    for plan in stage_cuts.plans(len(graph.nodes)):
        for node in graph.nodes[plan.begin : plan.end]:
            yield node, plan.stage


def require_same(graph: StepGraph, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ``SplitError`` on every rank if the step took another course on one of them. Collective.

    The same where it writes foreign tensors on one. From then on all ranks agree on whether it draws random numbers
    in Python.
    """
    lines = graph.digest()
    found = gather_json([_digest(lines), graph.draws, graph.foreign_writes], group, device)
    digests = [digest for digest, _, _ in found]
    graph.draws = any(draws for _, draws, _ in found)
    refuse_foreign_writes([place for _, _, places in found for place in places])
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    everyones = gather_json(lines, group, device)
    first, second = everyones[0], everyones[other]
    place = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(first), len(second)) if place is None else place
    here, there = (course[place] if place < len(course) else "the end" for course in (first, second))
    raise SplitError(
        f"The step takes another course on rank {other} than on rank 0: its item {place} is {there}, on rank 0 it is "
        f"{here}. Control flow may depend neither on the rank nor on random numbers."
    )


def refuse_foreign_writes(places: Sequence[str]) -> None:
    """Raise ``SplitError`` if a step writes tensors in place that were there before it, at ``places``."""
    if places:
        raise SplitError(
            f"The step writes a tensor in place at {places[0]} that was there before it: in a callback, a layer, a "
            "list, another object or a global variable. Stages would write it for each micro-batch, and not on all "
            "ranks. Keep it in an attribute of the LightningModule itself, with memory of its own, or assign a new one."
        )


def first_decides(decide: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> Any:
    """What ``decide`` returns on the first rank, or its error, on every rank. Collective."""
    answer: Any = None
    if group.rank() == 0:
        try:
            answer = {"value": decide()}
        except (SplitError, ReplayError) as error:
            answer = {"error": str(error)}
        except Exception as error:
            text = f"The step failed on rank 0 while it was tried: {error!r}"
            broadcast_json({"failure": text}, group, device)
            raise StepFailedError(text) from error
    answer = broadcast_json(answer, group, device)
    if "failure" in answer:
        raise StepFailedError(answer["failure"])
    if "error" in answer:
        raise SplitError(answer["error"])
    return answer["value"]
