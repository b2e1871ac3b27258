"""A step's graph as one stage sees it: which nodes are its own, and what that means for values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_smddp.pipeline.capture.graph import StepGraph

_PROBE = -1  # in place of a stage's number


@dataclass(frozen=True)
class StagePlan:
    """What a stage does: nodes ``[begin, end)``, and those in ``again``; values that it receives and sends."""

    stage: int
    begin: int
    end: int
    again: frozenset[int]
    receives: tuple[int, ...]
    sends: tuple[int, ...]


def probe_plan(graph: StepGraph) -> StagePlan:
    """A stage that does no node at all, and leaves at the last one that belongs to a stage for sure.

    A run of it shows which way the step's Python code takes, without computing anything.
    """
    certain = [node.index for node in graph.nodes if node.module is not None or node.parameters]
    blinds = [node.index for node in graph.nodes if node.blinds]  # from there on only the stage that has it can follow
    end = 0
    if certain:
        end = min([certain[-1], *blinds])
    return StagePlan(
        _PROBE,
        begin=end,
        end=end,
        again=frozenset(),
        receives=(),
        sends=(),
    )


class StageGraph:
    """A graph, one stage's plan, and what follows from the two; the same for all micro-batches.

    Args:
        graph: of the step.
        plan: of the stage.
        root: the module that the step belongs to.

    Attributes:
        nodes: the graph's.
        own: indices of the nodes that the stage does, those that it repeats included.
        told: nodes before the stage of which Python has read numbers; the stage receives them.
        tells: the same before the next stage; it is sent them.
        is_last: whether the stage comes to the end of the step.
        is_probe: whether this is no stage, but the plan of :func:`probe_plan`.
        last_unit: index of the last call of a module; -1 if there is none.
        sources: ids of the tensors from which bound operations start: parameters, and buffers that the step changes.
        changed_here: memories that this stage changes in place.
        changing: values that a change in place turns into another value, on any stage.
        changing_memories: memories that any stage changes in place.
        kept: values whose tensors are kept to the end of a run: sent, or made by a change in place.
    """

    def __init__(self, graph: StepGraph, plan: StagePlan, root: nn.Module) -> None:
        self.graph = graph
        self.plan = plan
        self.nodes = graph.nodes
        self.is_last = plan.end == len(graph.nodes)
        self.is_probe = plan.stage == _PROBE
        # Nodes that the stage repeats are its own, too: it does them instead of receiving what they make.
        own_range = range(plan.begin, plan.end)
        self.own = plan.again.union(own_range)
        # Numbers travel along with the values, over each boundary behind the node that reads them:
        #     nodes   0  1 (reads)  2 | 3  4 | 5            told: [] on the first stage, [1] on both others
        self.told = graph.told(plan.begin)
        self.tells = []
        if not self.is_last:
            self.tells = graph.told(plan.end)
        self.last_unit = -1
        for node in graph.nodes:
            if node.module is not None:
                self.last_unit = node.index
        self.sources = self._find_sources(root)
        self._find_changes()

    def _find_sources(self, root: nn.Module) -> set[int]:
        changed_buffers: set[str] = set()
        for node in self.nodes:
            changed_buffers.update(node.buffers)
        # Also parameters of other stages: on each rank they are objects, on the meta device.
        found = {id(parameter) for parameter in root.parameters()}
        for name, buffer in root.named_buffers():
            if name in changed_buffers:
                found.add(id(buffer))
        return found

    def _find_changes(self) -> None:
        self.changed_here: set[int] = set()
        self.changing: set[int] = set()
        self.changing_memories: set[int] = set()
        self.kept = set(self.plan.sends)
        for node in self.nodes:
            is_here = self.plan.begin <= node.index < self.plan.end
            for rebind in node.rebinds:
                memory = self.graph.values[rebind.new].memory
                self.changing_memories.add(memory)
                self.kept.add(rebind.new)
                if rebind.old is not None:
                    self.changing.add(rebind.old)
                if is_here:
                    self.changed_here.add(memory)

    def makes(self, value: int) -> bool:
        """Whether a node of this stage's range makes ``value``; a node that it repeats belongs to another stage."""
        maker = self.graph.producers.get(value, -1)
        return self.plan.begin <= maker < self.plan.end
