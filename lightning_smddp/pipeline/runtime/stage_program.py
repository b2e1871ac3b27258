"""What a stage does in a step, the same for all its runs; and who wants to know what of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.boundaries import seen_before
from lightning_smddp.pipeline.capture.graph import Node, StepGraph
from lightning_smddp.pipeline.runtime.remote import Shape, Shapes
from lightning_smddp.pipeline.runtime.stage_graph import StagePlan
from lightning_smddp.pipeline.runtime.wrappers import Wrappers

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
        self._changed = {graph.values[r.new].storage for n in graph.nodes[plan.begin : plan.end] for r in n.rebinds}

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
            elif node.rebinds or not all(kind == "argument" for kind, _ in node.returned.sources) or node.reads:
                remote.add(node.index)  # what only returns its argument need not come: `as_tensor` does not
        return frozenset(remote)

    def _sends_unseen(self) -> bool:
        """Whether it sends what no unit sees, nor it has received, nor made again."""
        if self.is_last:
            return False
        seen = seen_before(self.graph, self.plan.end).union(self.plan.receives)
        unseen = [value for value in self.plan.sends if value not in seen]
        return any(self.graph.producers[value] not in self.plan.again for value in unseen)

    def _find_kept(self) -> set[int]:
        """Values whose tensors a run has to keep: what is sent, and what that was before it was changed in place."""
        kept = set(self.plan.sends)
        for node in reversed(self.graph.nodes[: self.plan.end]):
            kept.update(rebind.old for rebind in node.rebinds if rebind.new in kept and rebind.old is not None)
        return kept

    def as_traced(self, value: int, tensor: Tensor) -> Tensor:
        """Received tensors are contiguous: give them the strides of old, and memory of their own if it is changed."""
        known = self.graph.values[value]
        shape = Shape(tuple(tensor.shape), known.stride, tensor.dtype, tensor.requires_grad)
        if known.shape == shape.shape and not shape.is_contiguous() and shape.is_dense():
            strided = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=tensor.device)
            return strided.copy_(tensor)
        return tensor.clone() if known.storage in self._changed else tensor
