"""From a whole model and its first batch to stages: traced on every rank, decided by the first, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_functions
from lightning_smddp.communication.objects import first, gather
from lightning_smddp.pipeline.activations import Checkpointing
from lightning_smddp.pipeline.capture.boundaries import StagePlan, cut_into_stages
from lightning_smddp.pipeline.capture.graph import SplitError, StepGraph
from lightning_smddp.pipeline.capture.graph_builder import Modules, build_graph
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.capture.records import Trace
from lightning_smddp.pipeline.capture.tracer import Fetch, StepCall, trace
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.partition.assignment import ParameterStages, ownership_of, parameter_stages_of
from lightning_smddp.pipeline.partition.costs import LossIn, NodeTimes, time_nodes
from lightning_smddp.pipeline.partition.split import choose_cuts, choose_units
from lightning_smddp.pipeline.runtime.remote_tensor import ReplayError
from lightning_smddp.planner.problem import Cluster

Result = TypeVar("Result")
_END = "its end"


class StepFailedError(SplitError):
    """The step itself raised something while it was run for nothing: on this rank its cause, or on another one."""


@dataclass(frozen=True)
class PartitionPlan:
    """How a model was divided.

    Attributes:
        graph, stages: the step that it was divided by.
        cluster: what it was divided for.
        ownership: which pipeline ranks hold which parameters.
        parameter_stages: for each parameter the stages that use it.
        decision: what the first rank decided, by times that it measured, in JSON: with the predicted ``stage_seconds``
            (forward and backward of a micro-batch) and ``stage_memory`` (bytes).
    """

    graph: StepGraph
    stages: tuple[StagePlan, ...]
    cluster: Cluster
    ownership: Ownership
    parameter_stages: ParameterStages
    decision: Mapping[str, Any]

    @property
    def is_exact(self) -> bool:
        """Whether all floating-point values of the step have at least 32 bits."""
        dtypes = {value.spec.dtype for value in self.graph.values}
        return all(dtype.itemsize >= 4 for dtype in dtypes if dtype.is_floating_point)


@dataclass(frozen=True)
class Trial:
    """A step to run for nothing, on one micro-batch.

    Attributes:
        run: does so, and returns what the step returned.
        loss_of: the loss in what the step returned; None if there is none.
        fetch: gives the first values of a parameter that has no memory yet. None: all have.
    """

    run: StepCall
    loss_of: LossIn
    fetch: Fetch | None = None


def make_plan(
    trial: Trial,
    root: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup,
    cluster: Cluster,
    split: Sequence[str] | None,
    checkpointing: Checkpointing,
    known: Mapping[str, Any] | None = None,
) -> PartitionPlan:
    """Find out how to divide ``root`` by a step. Collective over all ranks; nothing of the model changes.

    ``known`` is an earlier ``decision``, the same on all ranks. It is kept if the step is still the same, so that a
    resumed run has the same stages; else, and where ``split`` is given, it counts for nothing.

    Raises:
        SplitError: on every rank, when the step cannot be divided so; the message says why and what to do.
    """
    traced = record(trial.run, root, device, group, trial.fetch)
    modules = Modules(traced, root)
    if split is not None or (known is not None and len(known["stage_seconds"]) != cluster.num_stages):
        known = None

    def decide() -> Mapping[str, Any]:
        if known is not None:
            with suppress(SplitError):  # units of other code make another graph, or none
                if build_graph(traced, modules, known["splitting"]["units"]).digest() == known["digest"]:
                    return known
        graph = choose_units(traced, modules, cluster, split, checkpointing)
        times = NodeTimes.of_trace(graph)
        if trial.fetch is None:  # the whole model is here
            with preserve_state(root, device):
                times = time_nodes(graph, trial.run, trial.loss_of, root, device)
        found = choose_cuts(graph, cluster, times, split, checkpointing)
        return {  # checkpoints keep it, so keys stay as they are
            "splitting": {"units": list(graph.units), "cuts": list(found.cuts)},
            "stage_seconds": found.stage_seconds,
            "stage_memory": found.stage_memory,
            "digest": graph.digest(),
        }

    # Measured times differ between ranks, and with them the best units and cuts. So one rank decides, and all work out
    # from its words what follows: graph, stages and owners are the same functions of the same values.
    decision = first(decide, group)
    graph = same_graph(traced, modules, decision["splitting"]["units"], group)
    stages = cut_into_stages(graph, decision["splitting"]["cuts"])
    parameter_stages = parameter_stages_of(graph, stages, [name for name, _ in root.named_parameters()])
    buffers = [name for name, _ in root.named_buffers()]
    return PartitionPlan(
        graph=graph,
        stages=stages,
        cluster=cluster,
        ownership=ownership_of(graph, stages, parameter_stages, cluster.rank_of_stage, buffers),
        parameter_stages=parameter_stages,
        decision=decision,
    )


# ---- on all ranks together -------------------------------------------------------------------------------------------


def record(
    step: StepCall,
    root: nn.Module,
    device: torch.device,
    group: dist.ProcessGroup,
    fetch: Fetch | None = None,
) -> Trace:
    """Trace ``step`` on every rank; see :func:`trace`. Collective: an error on one rank is raised on all."""
    together = OnAllRanks(group)
    borrow: Fetch | None = None
    if fetch is not None:

        def borrow(name: str) -> Tensor:
            with without_torch_functions():  # memory of the exchange would be taken for some that the step writes
                together.check(f"parameter {name!r}")
            return fetch(name)

    def attempt() -> Trace:
        with preserve_state(root, device):
            return trace(step, root, device, borrow)

    return together.run(attempt)


def same_graph(traced: Trace, modules: Modules, units: Collection[str], group: dist.ProcessGroup) -> StepGraph:
    """:func:`build_graph` on every rank. Collective: an error on one rank is raised on all.

    Raises:
        SplitError: on every rank; also where the step takes another path on one of them, or writes tensors there that
            were there before it.
    """
    graph = OnAllRanks(group).run(lambda: build_graph(traced, modules, units))
    gathered = gather((graph.digest(), graph.draws, graph.reads_batch, graph.external_writes), group)
    # A module that keeps what it has read, on its own rank, reads again on the others.
    graph.draws = any(draws for _, draws, _, _ in gathered)
    graph.reads_batch = any(reads for _, _, reads, _ in gathered)
    refuse_external_writes([location for *_, locations in gathered for location in locations])
    for rank, (digest, *_) in enumerate(gathered):
        if digest != gathered[0][0]:
            raise SplitError(
                f"The step takes another path on rank {rank} than on rank 0. Control flow may depend neither on the "
                "rank nor on random numbers."
            )
    return graph


def refuse_external_writes(locations: Sequence[str]) -> None:
    """Raise ``SplitError`` if a step writes tensors in place that were there before it (``file:line`` of each)."""
    if locations:
        raise SplitError(
            f"The step writes a tensor in place at {locations[0]} that was there before it: in a callback, a layer, a "
            "list, another object or a global variable. Stages would write it for each micro-batch, and not on all "
            "ranks. Keep it in an attribute of the LightningModule itself, with memory of its own, or assign a new one."
        )


class OnAllRanks:
    """Runs a function on every rank of ``group``.

    Its collectives are announced by :meth:`check`: a rank that has come to its end, or to an error, is known to those
    that would wait for it there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._failure: SplitError | None = None  # why there are no more collectives

    def check(self, location: str, error: Exception | None = None) -> None:
        """Before a collective at ``location`` (file:line of the user's code), or behind an ``error``. Collective.

        Raises:
            SplitError: a rank does not come there; as :meth:`run` does.
        """
        # Each rank sends one message: where it has come to, and its error. So all of them take part in this exchange
        # wherever they are, and nobody is left alone in the user's own collective. After a failure all ranks know of
        # it, and nobody waits here any more.
        if self._failure is None:
            told: SplitError | None = None
            if isinstance(error, (SplitError, ReplayError)):
                told = SplitError(str(error))
            elif error is not None:
                told = StepFailedError(f"The step failed on rank {self.group.rank()} while it was traced: {error!r}")
            places, failures = zip(*gather((location, told), self.group), strict=True)
            if any(failures):
                self._failure = next(filter(None, failures))
            elif len(set(places)) > 1:
                where = ", ".join(f"{place} on rank {rank}" for rank, place in enumerate(places))
                self._failure = StepFailedError(
                    f"The step takes another path on each rank: while it was traced it came to {where}."
                )
        if self._failure is not None:  # a new one each time: with its traceback it would keep the group
            raise type(self._failure)(*self._failure.args) from None if isinstance(error, SplitError) else error

    def run(self, attempt: Callable[[], Result]) -> Result:
        """What ``attempt`` returns, if no rank fails. Collective.

        Raises:
            SplitError: on every rank, where one has raised it, or a ``ReplayError``.
            StepFailedError: on every rank, where one has failed otherwise; what was raised here is its cause.
        """
        try:
            result = attempt()
        except Exception as error:
            self.check(_END, error)
            raise
        self.check(_END)
        return result


def own_error(error: Exception) -> BaseException:
    """What the user's code raised here, if it is that."""
    if isinstance(error, StepFailedError) and error.__cause__ is not None:
        return error.__cause__
    return error
