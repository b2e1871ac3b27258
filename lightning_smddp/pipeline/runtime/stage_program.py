"""A step cut into stages: what each of them does, and what is known of the step while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_smddp.pipeline.activations import Checkpointing
from lightning_smddp.pipeline.capture.boundaries import StagePlan, seen_before
from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.records import TensorSpec, Value
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.messages import Boundary
from lightning_smddp.pipeline.runtime.wrappers import Wrappers

_DRY_RUN = -1  # in place of a stage's number


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
        checkpointing: what units keep for backward.

    Attributes:
        absent: names of the parameters that are on the meta device, by identity.
        remote: operations before the stage that must come, in their order.
        buffers: names of those that the step changes and code between units uses, by identity.
        watches: whether it runs under :class:`Watch`.
        keeps_arguments: units of whose arguments a run has to keep tensors.
        keeps_results: nodes of whose results.
        next_unit: by position, the first unit there or behind; None behind the last.
        stands_for: by unit of an earlier stage that returns one tensor and changes none, the value that this is.
    """

    def __init__(
        self,
        graph: StepGraph,
        plan: StagePlan,
        wrappers: Wrappers,
        checkpointing: Checkpointing = False,
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
        between = [node for node in graph.nodes if node.module is None]
        used = {name for node in between for name in node.buffers + node.buffers_read}
        self.buffers = {id(buffer): name for name, buffer in root.named_buffers() if name in used}
        # What the user's code writes to buffers, of the batch alone, an earlier stage writes: maybe on this rank.
        self.watches = any(node.buffers for node in between if node.index < plan.begin) or self._sends_unseen()
        # Values whose tensors a run has to keep: what is sent, and what that was before it was changed in place.
        kept = set(plan.sends)
        self.written_in_place: list[tuple[int | None, int]] = []  # what these were, and are
        for old, new, _ in reversed([version for node in graph.nodes[: plan.end] for version in node.versions]):
            if new in kept:
                kept.add(new if old is None else old)
                self.written_in_place.insert(0, (old, new))
        self.keeps_arguments = {node.index for node in graph.nodes if kept.intersection(node.entry)}
        makers = [node.index for node in graph.nodes if kept.intersection(node.outputs)]
        self.keeps_results = plan.recomputed.union(makers)
        self.next_unit = [None if index == len(graph.nodes) else graph.nodes[index] for index in graph.next_unit]
        before = [node for node in graph.nodes[: plan.begin] if node.module is not None and not node.versions]
        bare = [node for node in before if node.returned.skeleton is ...]
        self.stands_for = {node.index: value for node in bare for value in node.returned.values}
        self._permuted = {value for value in plan.receives if _is_permuted(graph.values[value])}
        dense = [buffer for buffer in root.buffers() if type(buffer) is Tensor and buffer.layout == torch.strided]
        self._buffers = {buffer.untyped_storage().data_ptr() for buffer in dense}  # where they are in memory
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
        unseen = set(self.plan.sends) - seen
        return any(self.graph.producers[value] not in self.plan.recomputed for value in unseen)

    def as_traced(self, value: int, tensor: Tensor) -> Tensor:
        """Received tensors are contiguous: give them the strides of old, and memory of their own if it is changed."""
        known = self.graph.values[value]
        if value in self._permuted and known.spec.shape == tuple(tensor.shape):
            shape, stride = known.spec.shape, known.spec.stride
            strided = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
            return strided.copy_(tensor)
        return tensor.clone() if known.storage in self._changed else tensor

    def as_sent(self, tensor: Tensor) -> Tensor:
        """What is in a buffer's memory may be written by the next micro-batch before it has gone: a copy goes."""
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._buffers else tensor


def _is_permuted(value: Value) -> bool:
    """Whether it has memory without holes, in another order than a new tensor."""
    like = torch.empty_strided(value.spec.shape, value.spec.stride, device="meta")
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
class Shapes:
    """What values and constants look like for micro-batches of one signature.

    Attributes:
        values: of the graph, by number.
        constants: numbers and texts that a node returned, by its index and the leaf of the result. Without an entry
            they are as they were in the trace, as types and devices always are.
    """

    values: dict[int, TensorSpec] = field(default_factory=dict)
    constants: dict[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: StepGraph) -> Shapes:
        """The shapes of all values of a traced step, which hold until a micro-batch has another shape."""
        return cls({value.index: value.spec for value in graph.values})

    def merge(self, other: Shapes) -> None:
        """Take over what ``other`` knows."""
        self.values.update(other.values)
        self.constants.update(other.constants)


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

    def path(self, shapes: Shapes, number: int, train: bool) -> TracedPath:
        """This path for micro-batches with these ``shapes``; ``train``: a backward follows."""
        crossing = [(), *(stage.sends for stage in self.stages)]
        boundaries = [Boundary.of([shapes.values[value] for value in sent], train) for sent in crossing]
        return TracedPath(self, shapes, number, boundaries)


class TracedPath(NamedTuple):
    """The path that the step takes on a micro-batch.

    Attributes:
        staged: the path.
        shapes: what its values look like there.
        number: the same on all ranks.
        boundaries: the tensors that go into each stage, and out of the last one: none at both ends.
    """

    staged: StagedStep
    shapes: Shapes
    number: int
    boundaries: Sequence[Boundary]
