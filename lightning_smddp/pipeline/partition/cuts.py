"""A step cut into stages, and what each stage then does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_smddp.pipeline.capture.boundaries import boundary_values
from lightning_smddp.pipeline.capture.graph import Node, StepGraph
from lightning_smddp.pipeline.runtime.stage_graph import StagePlan


@dataclass(frozen=True)
class StageCuts:
    """A step cut into stages.

    Attributes:
        units: modules that are placed whole.
        cuts: first nodes of all stages but the first.
        live: the values that cross each cut.
        again: for each stage the earlier nodes that it repeats.
    """

    units: tuple[str, ...]
    cuts: tuple[int, ...]
    live: tuple[tuple[int, ...], ...]
    again: tuple[tuple[int, ...], ...]

    @classmethod
    def at(cls, graph: StepGraph, cuts: Sequence[int]) -> StageCuts:
        """Cut ``graph`` before the nodes ``cuts``."""
        if not graph.nodes:  # a step that returns at once
            return cls(graph.units, tuple(cuts), ((),) * len(cuts), ((),) * (len(cuts) + 1))
        live, again = boundary_values(graph, cuts)
        repeated = tuple(tuple(sorted(nodes)) for nodes in again)
        return cls(graph.units, tuple(cuts), tuple(live), repeated)

    def plans(self, num_nodes: int) -> list[StagePlan]:
        """What each stage does in a step of ``num_nodes`` nodes."""
        plans = []
        received: tuple[int, ...] = ()
        for stage, (begin, end) in enumerate(self._bounds(num_nodes)):
            sent: tuple[int, ...] = ()
            if stage < len(self.cuts):
                sent = self.live[stage]
            repeated = frozenset(self.again[stage])
            plans.append(StagePlan(stage, begin, end, repeated, received, sent))
            received = sent
        return plans

    def _bounds(self, num_nodes: int) -> Iterator[tuple[int, int]]:
        """The first node of each stage, and the first one behind it."""
        return pairwise([0, *self.cuts, num_nodes])

    def nodes_by_stage(self, graph: StepGraph) -> Iterator[tuple[int, Node]]:
        """All nodes of ``graph`` in order, each with the stage that it belongs to."""
        for stage, (begin, end) in enumerate(self._bounds(len(graph.nodes))):
            for node in graph.nodes[begin:end]:
                yield stage, node

    def to_json(self) -> Any:
        """What a checkpoint keeps: the rest follows from the graph."""
        return {"units": list(self.units), "cuts": list(self.cuts)}
