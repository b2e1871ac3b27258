"""What a stage knows of tensors that it does not have, not yet or never: what they look like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_smddp.pipeline.capture.graph import StepGraph
from lightning_smddp.pipeline.capture.records import TensorSpec

OTHER_PATH = (
    "When it was traced it took another path. What the step does before its last module may not depend on "
    "torch's random numbers, or on values of tensors that modules made."
)


class ReplayError(RuntimeError):
    """The step took another path than when it was traced."""


@dataclass
class Shapes:
    """What values and constants look like for micro-batches of one signature.

    Attributes:
        values: of the graph, by number.
        constants: numbers and texts that a node returned, by its index and the leaf of the result. Without an entry
            they are as they were in the trace, as types and devices always are.
        boundaries: of ``messages.py``, by whether a backward follows, where that was asked for.
    """

    values: dict[int, TensorSpec] = field(default_factory=dict)
    constants: dict[tuple[int, int], Any] = field(default_factory=dict)
    boundaries: dict[bool, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, graph: StepGraph) -> Shapes:
        """The shapes of all values of a traced step, which hold until a micro-batch has another shape."""
        return cls({value.index: value.spec for value in graph.values})

    def merge(self, other: Shapes) -> None:
        """Take over what ``other`` knows."""
        self.values.update(other.values)
        self.constants.update(other.constants)
