"""What a stage knows of tensors that it does not have, not yet or never: what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.records import TensorSpec

OTHER_PATH = (
    "When it was traced it took another path. What the step does before its last module may not depend on "
    "torch's random numbers, or on values of tensors that modules made."
)

AS_TRACED = {"as": "traced"}  # stands for constants that are neither numbers nor texts: types, devices


class ReplayError(RuntimeError):
    """The step took another path than when it was traced."""


@dataclass
class Shapes:
    """What values and constants look like for micro-batches of one signature.

    Attributes:
        values: of the graph, by number.
        constants: by node, for those that returned any: one entry for each leaf of the result.
        boundaries: of ``messages.py``, by stage and whether a backward follows, where that was asked for.
    """

    values: dict[int, TensorSpec] = field(default_factory=dict)
    constants: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    boundaries: dict[tuple[int, bool], Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, graph: StepGraph) -> Shapes:
        """The shapes of all values of a traced step, which hold until a micro-batch has another shape."""
        return cls({value.index: value.spec for value in graph.values})

    def merge(self, other: Shapes) -> None:
        """Take over what ``other`` knows."""
        self.values.update(other.values)
        self.constants.update(other.constants)


def constants_of(result: Sequence[Any]) -> tuple[Any, ...]:
    """What is kept of the leaves of a call's result: numbers and texts. Others are as they were in the trace."""
    return tuple(leaf if leaf is None or isinstance(leaf, (bool, int, float, str)) else AS_TRACED for leaf in result)
