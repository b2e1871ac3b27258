"""A step cut into stages: what each of them does, and what is known of the step while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.boundaries import seen_before
from lightning_smddp.pipeline.capture.graph import Node, StepGraph
from lightning_smddp.pipeline.capture.records import Value
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.remote import Boundary, Shapes, TensorSpec
from lightning_smddp.pipeline.runtime.step_exchange import Failure
from lightning_smddp.pipeline.runtime.wrappers import Wrappers

_DRY_RUN = -1  # in place of a stage's number

Observer: TypeAlias = Callable[[Node, bool, Any], None]
"""(node, whether it ends, its result then): called around each own unit."""


@dataclass(frozen=True)
class Observers:
    """Who wants to know what of a run.

    Attributes:
        node: called around each unit that is run here.
        shapes: takes down what is found here; those of earlier operations are found by doing them once, on zeros.
        reads: takes down what Python code reads of the batch.
    """

    node: Observer | None = None
    shapes: Shapes | None = None
    reads: list[str] | None = None


NOBODY = Observers()


@dataclass(frozen=True)
class StagePlan:
    """What a stage does: nodes ``[begin, end)``, and ``recomputed`` ones before; values that it receives and sends."""

    stage: int
    begin: int
    end: int
    recomputed: frozenset[int]
    receives: tuple[int, ...]
    sends: tuple[int, ...]


def dry_run_plan(graph: StepGraph) -> StagePlan:
    """A stage that does no node at all, and leaves at the last one that belongs to a stage for sure.

    A run of it shows which way the step's Python code takes, without computing anything.
    """
    units = [node.index for node in graph.nodes if node.module is not None]
    # From where Python reads a tensor that a module made, or a size depends on it, nothing is known of the way.
    reads = [node.index for node in graph.nodes if node.varies or (node.reads and (node.inputs or node.parameters))]
    end = min([units[-1], *reads]) if units else 0
    return StagePlan(_DRY_RUN, begin=end, end=end, recomputed=frozenset(), receives=(), sends=())


class StageProgram:
    """What a stage does in a step, the same for all its runs.

    Args:
        graph: the step.
        plan: the stage's part of it.
        wrappers: of the module that the step belongs to.
        checkpointing: keep only the inputs of units for backward, and run units again in it.

    Attributes:
        absent: names of the parameters that are on the meta device, by identity.
        remote: operations before the stage that must come, in their order.
        watches: whether it runs under :class:`Watch`.
    """

    def __init__(
        self,
        graph: StepGraph,
        plan: StagePlan,
        wrappers: Wrappers,
        checkpointing: bool = False,
    ) -> None:
        root = wrappers.root
        self.graph = graph
        self.plan = plan
        self.wrappers = wrappers
        self.device = wrappers.device
        self.checkpointing = checkpointing
        self.names = {id(parameter): name for name, parameter in root.named_parameters()}
        self.absent = {id(p): name for name, p in root.named_parameters() if p.is_meta}
        self.is_last = plan.end == len(graph.nodes)
        self.remote = self._find_remote()
        # What the user's code writes to buffers, of the batch alone, an earlier stage writes: maybe on this rank.
        written = {name for node in graph.nodes[: plan.begin] if node.module is None for name in node.buffers}
        self.written = {id(buffer): name for name, buffer in root.named_buffers() if name in written}
        self.watches = graph.mixes_draws or bool(written) or self._sends_unseen()
        self.kept = self._find_kept()
        self.inputs = [frozenset(node.inputs) for node in graph.nodes]
        self._permuted = {value for value in plan.receives if _is_permuted(graph.values[value])}
        self._changed = {graph.values[r.new].storage for n in graph.nodes[plan.begin : plan.end] for r in n.versions}

    def _find_remote(self) -> frozenset[int]:
        """Operations before the stage that are not of the batch and of parameters that are here alone."""
        held = set(self.names.values()).difference(self.absent.values())
        real: set[int] = set()
        remote: set[int] = set()
        for node in self.graph.nodes[: self.plan.begin]:
            if node.module is not None:
                continue
            if real.issuperset(node.inputs) and held.issuperset(node.parameters):
                real.update(node.outputs)
            elif node.versions or not all(kind == "argument" for kind, _ in node.returned.sources) or node.reads:
                remote.add(node.index)  # what only returns its argument need not come: `as_tensor` does not
        return frozenset(remote)

    def _sends_unseen(self) -> bool:
        """Whether it sends what no unit sees, nor it has received, nor made again."""
        if self.is_last:
            return False
        seen = seen_before(self.graph, self.plan.end).union(self.plan.receives)
        unseen = [value for value in self.plan.sends if value not in seen]
        return any(self.graph.producers[value] not in self.plan.recomputed for value in unseen)

    def _find_kept(self) -> set[int]:
        """Values whose tensors a run has to keep: what is sent, and what that was before it was changed in place."""
        kept = set(self.plan.sends)
        for node in reversed(self.graph.nodes[: self.plan.end]):
            kept.update(version.old for version in node.versions if version.new in kept and version.old is not None)
        return kept

    def as_traced(self, value: int, tensor: Tensor) -> Tensor:
        """Received tensors are contiguous: give them the strides of old, and memory of their own if it is changed."""
        known = self.graph.values[value]
        if value in self._permuted and known.shape == tuple(tensor.shape):
            strided = torch.empty_strided(known.shape, known.stride, dtype=tensor.dtype, device=tensor.device)
            return strided.copy_(tensor)
        return tensor.clone() if known.storage in self._changed else tensor


def _is_permuted(value: Value) -> bool:
    """Whether it has memory without holes, in another order than a new tensor."""
    like = torch.empty_strided(value.shape, value.stride, device="meta")
    return not like.is_contiguous() and torch.empty_like(like).stride() == like.stride()


class Step(Protocol):
    """The user's step on one micro-batch."""

    def __call__(self, microbatch: MicroBatch) -> Any:
        """Run the step's code; returns what it returns."""
        ...

    def around(
        self,
        stage: int | None,
        index: int,
        microbatch: MicroBatch,
        keep: bool,
    ) -> AbstractContextManager[object]:
        """Around the run of ``stage``, or a run for nothing (None), of micro-batch ``index``.

        ``keep`` where the step ends.
        """
        ...

    def seed_of(self, index: int) -> int:
        """The seed of the random numbers of micro-batch ``index``, the same on all ranks of the pipeline."""
        ...

    def forget(self) -> None:
        """Throw away what was kept of runs so far."""
        ...

    def loss(self, microbatch: MicroBatch, result: Any) -> Tensor | None:
        """The loss to differentiate, weighted: the batch's loss is their sum. Called where the step ends."""
        ...


@dataclass
class StagedStep:
    """One path of a step, the modules and operations that it goes through in order, cut into stages.

    Attributes:
        graph: of the step on that path.
        stages: what each stage does.
        programs: by stage, for those of this rank.
        dry_run: runs the step's Python code without doing any node, see :func:`dry_run_plan`.
    """

    graph: StepGraph
    stages: tuple[StagePlan, ...]
    programs: dict[int, StageProgram]
    dry_run: StageProgram

    def boundary(self, stage: int, shapes: Shapes, train: bool) -> Boundary:
        """The tensors that ``stage`` sends to the next one."""
        known_boundary = shapes.boundaries.get((stage, train))
        if known_boundary is not None:
            return known_boundary
        specs = []
        for value in self.stages[stage].sends:
            known = shapes.values[value]
            requires_grad = known.requires_grad and train
            specs.append(TensorSpec(known.shape, known.dtype, requires_grad))
        shapes.boundaries[stage, train] = boundary = tuple(specs)
        return boundary


class TracedPath(NamedTuple):
    """The path that the step takes on a micro-batch, and what its values look like there."""

    staged: StagedStep
    shapes: Shapes


@dataclass
class RunningStep:
    """The step that a pipeline runs now, as all stages of this rank see it.

    Attributes:
        paths: of each micro-batch.
        step: the user's.
        microbatches: of the batch.
        train: whether there is a backward.
        observe: called around each node that is done here.
        results: where the step ends here, what it returned for each micro-batch.
        failures: on stages here. Behind the first one nothing is computed here any more.
    """

    paths: Sequence[TracedPath]
    step: Step
    microbatches: Sequence[MicroBatch]
    train: bool
    observe: Observer | None
    results: list[Any]
    failures: list[Failure] = field(default_factory=list)
