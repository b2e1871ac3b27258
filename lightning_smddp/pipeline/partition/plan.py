"""From a whole model and its first batch to stages: traced on every rank, decided by the first, the same everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.graph import (
    IsSmall,
    Modules,
    SplitError,
    StepGraph,
    build_graph,
    first_difference,
)
from lightning_smddp.pipeline.capture.preserve_state import kept_parameters, preserve_state
from lightning_smddp.pipeline.capture.records import Trace
from lightning_smddp.pipeline.capture.tracer import Fetch, Step, trace
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.partition.cuts import (
    Resources,
    StageCuts,
    choose_units,
    homes_of,
    is_within,
    neighbour_stage,
    partition,
)
from lightning_smddp.pipeline.partition.hardware import explained_shortage
from lightning_smddp.pipeline.partition.reference import LossIn, Reference, fastest, run_plain, run_reference
from lightning_smddp.pipeline.runtime.departures import StepFailedError, Together
from lightning_smddp.pipeline.runtime.draws import without_own_dropout
from lightning_smddp.pipeline.runtime.remote import ReplayError
from lightning_smddp.planner.partition import Partition
from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.gather import all_agree, gather_json

CHECK_SEED = 20240229  # of the reference and of what is compared with it; any number that all ranks know
REFERENCE_RUNS = 3  # of one micro-batch, for its times


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
    def stage_of_node(self) -> list[int]:
        """The stage of each node of the graph."""
        return [stage for stage, _ in self.stage_cuts.nodes_by_stage(self.graph)]

    @property
    def is_exact(self) -> bool:
        """Whether all floating-point values of the step have at least 32 bits."""
        return all(value.dtype.itemsize >= 4 for value in self.graph.values if value.dtype.is_floating_point)


@dataclass(frozen=True)
class Trial:
    """A step to run for nothing: on one micro-batch for the trace, on another for the reference.

    They should differ, so that what is left over from one is not right for the other. Where the other one takes another
    course, the traced one is the reference, too.

    Attributes:
        traced: runs the step for the trace.
        referred: runs it for the reference.
        loss_of: the loss in what the step returned; None if there is none.
        fetch: gives the first values of a parameter that has no memory yet; then there is no reference. None: all have.
    """

    traced: Step
    referred: Step
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
    together = Together(group, device)

    def fetch_together(name: str) -> Tensor:
        assert fetch is not None
        together.meet(f"parameter {name!r}")
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
    device: torch.device,
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
    if split is not None:
        known = None
    if known is not None and len(known["stage_seconds"]) != resources.num_stages:
        known = None
    graph = _known_graph(known, traced, modules, root, group, device)
    # The step may be another one than that which an earlier decision was made for: then it is decided anew.
    if graph is None:
        known = None

        def choose() -> tuple[str, ...]:
            return choose_units(traced, modules, resources, split, checkpointing).units

        units = first_decides(choose, group, device)
        graph = build_on_all(traced, modules, is_within(units), group, device)
    require_same(graph, group, device)

    def decide() -> dict[str, Any]:
        reference = _measure(graph, trial, root, device)
        if known is not None:
            decision = dict(known)
        else:
            found = partition(graph, resources, reference, split, checkpointing)
            decision = _decision(graph, found)
        decision["reference"] = None
        if reference is not None:
            decision["reference"] = asdict(reference)
        return decision

    # Measured times differ between ranks, and with them the best cuts. So one rank decides, and all work out from its
    # words, plain data, what follows: graph, homes and owners are the same functions of the same values everywhere.
    decision = first_decides(decide, group, device)
    return _plan_of(decision, graph, root, resources)


def _measure(
    graph: StepGraph,
    trial: Trial,
    root: nn.Module,
    device: torch.device,
) -> Reference | None:
    """A run of the whole step on this rank; None where it has not the whole model."""
    if trial.fetch is not None:
        return None
    with explained_shortage(is_whole=True), without_own_dropout(root, device):
        return _refer(graph, trial, root, device)


def _plan_of(
    decision: dict[str, Any],
    graph: StepGraph,
    root: nn.Module,
    resources: Resources,
) -> PartitionPlan:
    """What follows from a decision, the same on every rank; its ``reference`` is taken out of it."""
    measured = decision.pop("reference")
    reference = None
    if measured is not None:
        reference = Reference(**measured)
    stage_cuts = StageCuts.at(graph, decision["splitting"]["cuts"])
    homes = homes_of(graph, stage_cuts, list(dict(root.named_parameters())))
    ownership = ownership_of(
        graph,
        stage_cuts,
        homes,
        resources,
        list(dict(root.named_buffers())),
    )
    return PartitionPlan(
        graph=graph,
        stage_cuts=stage_cuts,
        ownership=ownership,
        homes=homes,
        reference=reference,
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
        "digest": _digest(graph.digest()),
    }


def _refer(graph: StepGraph, trial: Trial, root: nn.Module, device: torch.device) -> Reference:
    """The whole step on one micro-batch, a few times: the fastest run; and once as it is, without replay."""
    # Parameters are copied, to be put back, only where the step was seen to change something that lasts.
    kept: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
    if graph.once_a_batch:
        kept = kept_parameters

    def refer(step: Step, own_numbers: bool) -> Reference:
        with preserve_state(root, device), kept(root):
            return run_reference(
                graph,
                step,
                trial.loss_of,
                root,
                device,
                CHECK_SEED,
                own_numbers,
            )

    # Three runs by replay: with random numbers of each node's own, with those of a plain step, and once more for the
    # times. Then the step as the user wrote it, which is compared with the second.
    step = trial.referred
    of_trace = False
    try:
        runs = [refer(step, own_numbers=True)]
    except ReplayError:  # it takes another path
        step = trial.traced
        of_trace = True
        runs = [refer(step, own_numbers=True)]
    can_run_plain = True
    try:
        runs.append(refer(step, own_numbers=False))
    except ReplayError:
        if not graph.shares_draws:
            raise
        can_run_plain = False  # with other random numbers it takes another path: a plain run shows nothing
        runs.append(runs[0])
    while len(runs) < REFERENCE_RUNS:
        runs.append(refer(step, own_numbers=True))
    reference = replace(fastest(runs), of_trace=of_trace)
    if can_run_plain:
        with preserve_state(root, device), kept(root):
            loss, norms = run_plain(step, trial.loss_of, root, device, CHECK_SEED)
    else:
        loss, norms = reference.again_loss, reference.again_norms
    reference.plain_loss = loss
    reference.plain_norms = norms
    return reference


def _known_graph(
    known: Mapping[str, Any] | None,
    traced: Trace,
    modules: Modules,
    root: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
) -> StepGraph | None:
    """:func:`_graph_of` if it is one on all ranks, which go the same way from there. Collective."""
    graph = None
    if known is not None:
        graph = _graph_of(known, traced, modules, root)
    if all_agree(graph is not None, group, device):
        return graph
    return None


def _graph_of(
    known: Mapping[str, Any],
    traced: Trace,
    modules: Modules,
    root: nn.Module,
) -> StepGraph | None:
    """The step's graph with the units of an earlier decision, if it is the one that was decided on."""
    # Units whose modules are gone make no graph; equal ones may make another graph, as the code may have changed.
    units = known["splitting"]["units"]
    names = dict(root.named_modules())
    if any(unit not in names for unit in units):
        return None
    try:
        graph = build_graph(traced, modules, is_within(units))
    except SplitError:
        return None
    if _digest(graph.digest()) != known["digest"]:
        return None
    return graph


def _digest(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    return hashlib.sha256(text.encode()).hexdigest()


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
    units: dict[str, int] = {}  # and their stages
    for stage, node in stage_cuts.nodes_by_stage(graph):
        if node.module is not None:
            units[node.module] = stage
        for name in node.buffers:
            other = buffers.setdefault(name, ranks[stage])
            if other != ranks[stage]:
                raise SplitError(
                    f"Buffer {name!r} is changed on ranks {other} and {ranks[stage]} of the pipeline: the "
                    "module that changes it is called in several stages. Cut elsewhere by `split=`."
                )
    for name in all_buffers:
        if name not in buffers:
            stage = _stage_of_buffer(name, units, homes)
            buffers[name] = ranks[stage]
    parameters = {}
    for name, stages in homes.items():
        holders = [ranks[stage] for stage in stages]
        parameters[name] = tuple(dict.fromkeys(holders))  # several stages may be on one rank
    return Ownership(parameters, buffers, max(ranks) + 1)


def _stage_of_buffer(name: str, units: Mapping[str, int], homes: Mapping[str, Sequence[int]]) -> int:
    for unit, stage in units.items():
        if name.startswith(f"{unit}."):
            return stage
    return neighbour_stage(name, homes)


def require_same(graph: StepGraph, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ``SplitError`` on every rank if the step took another course on one of them. Collective.

    The same where it writes foreign tensors on one. From then on all ranks agree on whether it draws random numbers
    in Python.
    """
    lines = graph.digest()
    mine = [_digest(lines), graph.draws, graph.foreign_writes]
    gathered = gather_json(mine, group, device)
    graph.draws = any(draws for _, draws, _ in gathered)
    for _, _, locations in gathered:
        refuse_foreign_writes(locations)
    # A short digest first. Only where one differs do all ranks, which know that alike, send their lines for a message.
    digests = [digest for digest, _, _ in gathered]
    expected = digests[0]
    differing = [rank for rank, digest in enumerate(digests) if digest != expected]
    if not differing:
        return
    other = differing[0]
    lines_by_rank = gather_json(lines, group, device)
    position, first, second = first_difference(lines_by_rank[0], lines_by_rank[other])
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


def first_decides(decide: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> Any:
    """What ``decide`` returns on the first rank, or its error, on every rank. Collective.

    Raises:
        SplitError: the first rank's ``SplitError`` or ``ReplayError``, with its text.
        StepFailedError: any other error there; its cause is known on the first rank alone.
    """
    answer: Any = None
    if group.rank() == 0:
        try:
            answer = {"value": decide()}
        except (SplitError, ReplayError) as error:
            answer = {"error": str(error)}
        except Exception as error:
            text = f"The step failed on rank 0 while it was tried: {error!r}"
            # The others wait for an answer, whatever it is. Here the error itself is raised, as it has the cause.
            broadcast_json({"failure": text}, group, device)
            raise StepFailedError(text) from error
    answer = broadcast_json(answer, group, device)
    if "failure" in answer:
        raise StepFailedError(answer["failure"])
    if "error" in answer:
        raise SplitError(answer["error"])
    return answer["value"]
