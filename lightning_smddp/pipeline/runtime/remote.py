"""What a stage knows of tensors that it does not have, not yet or never: what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

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


@dataclass(frozen=True)
class Shape:
    """What is known of a value without having it. Strides are elements; sparse and nested tensors have none."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """The shape, stride (of strided tensors), dtype and ``requires_grad`` of ``tensor``."""
        shape: tuple[int, ...] = ()
        stride: tuple[int, ...] = ()
        if not tensor.is_nested:
            shape = tuple(tensor.shape)
            if tensor.layout == torch.strided:
                stride = tuple(tensor.stride())
        return cls(shape, stride, tensor.dtype, tensor.requires_grad)


class TensorSpec(NamedTuple):
    """What a receiver has to know about a tensor before it arrives.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether a gradient comes back for it in training.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """What a receiver has to know of ``tensor`` to allocate it."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Memory on ``device`` for such a tensor, to receive it in; what is in it has no meaning."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


Boundary: TypeAlias = Sequence[TensorSpec]
"""What one stage sends to the next for one micro-batch."""


@dataclass
class Shapes:
    """What values and constants look like for micro-batches of one signature.

    Attributes:
        values: of the graph, by number.
        constants: by node, for those that returned any: one entry for each leaf of the result.
        is_traced: whether they are those of the trace, so that constants are, too.
        boundaries: what a stage sends on, by its number and whether a backward follows, where that was asked for.
    """

    values: dict[int, Shape] = field(default_factory=dict)
    constants: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    is_traced: bool = False
    boundaries: dict[tuple[int, bool], Boundary] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, graph: StepGraph) -> Shapes:
        """The shapes of all values of a traced step, which hold until a micro-batch has another shape."""
        values: dict[int, Shape] = {}
        for value in graph.values:
            values[value.index] = Shape(value.shape, value.stride, value.dtype, value.requires_grad)
        return cls(values, is_traced=True)

    def merge(self, other: Shapes) -> None:
        """Take over what ``other`` knows."""
        self.values.update(other.values)
        self.constants.update(other.constants)
        self.boundaries.clear()


def constants_of(result: Sequence[Any]) -> tuple[Any, ...]:
    """What is kept of the leaves of a call's result: numbers and texts. Others are as they were in the trace."""
    return tuple(leaf if leaf is None or isinstance(leaf, (bool, int, float, str)) else AS_TRACED for leaf in result)
