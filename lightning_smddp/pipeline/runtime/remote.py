"""What a stage knows of tensors that it does not have, not yet or never: what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.graph import StepGraph

OTHER_PATH = (
    "When it was traced it took another path. What the step does before its last module may not depend on "
    "torch's random numbers, or on values of tensors that modules made."
)

AS_TRACED = {"as": "traced"}  # stands for constants that are neither numbers nor texts: types, devices


class ReplayError(RuntimeError):
    """The step took another path than when it was traced."""


class TensorSpec(NamedTuple):
    """What is known of a tensor without having it.

    Attributes:
        shape: Its shape; () of nested ones.
        dtype: Its dtype.
        requires_grad: Whether it requires a gradient; of one that is sent, whether a gradient comes back for it.
        stride: In elements, if it is known. Sparse and nested tensors have none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """What a receiver of ``tensor`` has to know: no stride if it is sparse, and no shape either if nested."""
        if tensor.is_nested:
            return cls((), tensor.dtype, tensor.requires_grad)
        stride = tensor.stride() if tensor.layout == torch.strided else ()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tuple(stride))

    def empty(self, device: torch.device) -> Tensor:
        """Memory on ``device`` for such a tensor, to receive it in; what is in it has no meaning."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


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
        values: dict[int, TensorSpec] = {}
        for value in graph.values:
            values[value.index] = TensorSpec(value.shape, value.dtype, value.requires_grad, value.stride)
        return cls(values)

    def merge(self, other: Shapes) -> None:
        """Take over what ``other`` knows."""
        self.values.update(other.values)
        self.constants.update(other.constants)


def constants_of(result: Sequence[Any]) -> tuple[Any, ...]:
    """What is kept of the leaves of a call's result: numbers and texts. Others are as they were in the trace."""
    return tuple(leaf if leaf is None or isinstance(leaf, (bool, int, float, str)) else AS_TRACED for leaf in result)
