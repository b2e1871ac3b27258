"""A step's graph as one stage sees it: which nodes are its own, and what that means for values."""

from __future__ import annotations

from dataclasses import dataclass

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
    units = [node.index for node in graph.nodes if node.module is not None]
    # From where Python reads a tensor that a module made, or a size depends on it, nothing is known of the way.
    reads = [node.index for node in graph.nodes if node.varies or (node.reads and (node.inputs or node.parameters))]
    end = min([units[-1], *reads]) if units else 0
    return StagePlan(
        _PROBE,
        begin=end,
        end=end,
        again=frozenset(),
        receives=(),
        sends=(),
    )
