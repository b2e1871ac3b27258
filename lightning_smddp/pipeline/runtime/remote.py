"""What a stage knows of tensors that it does not have, not yet or never: their shapes, and numbers that Python read.

All numbers that Python read of one micro-batch on earlier stages are one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.graph import Node, StepGraph
from lightning_smddp.pipeline.capture.ops import name_of
from lightning_smddp.pipeline.capture.user_code import user_location
from lightning_smddp.wire.encode import bits_of, dtype_of, float_of, name_of_dtype
from lightning_smddp.wire.pytree import leaves, rebuild

OTHER_COURSE = (
    "When it was traced it took another course. What the step does before its last module may not depend on "
    "torch's random numbers, or on values of tensors that modules made."
)

AS_TRACED = {"as": "traced"}  # stands for constants that are no JSON: types, devices


class ReplayError(RuntimeError):
    """The step took another path than when it was traced."""


# The function mode of a run (`replay.Run`) comes before a tensor's own `__torch_function__`: it answers what may be
# asked, and finds the stand-in for each node's result. All else comes to the class, and is refused.
class RemoteTensor(Tensor):
    """A value of another stage: it has a shape and a type, but no numbers. Any operation on it raises.

    Attributes:
        value: its number in the graph: what a step leaves in attributes is found by it.
        pattern: a plain tensor like it on the meta device, which may be asked for shape and type.
    """

    value: int
    pattern: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ReplayError(
            f"{name_of(func)} at {user_location()} uses a tensor of another stage where it cannot be followed. "
            "Put this code, and what made the tensor, into one module."
        )


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

    def is_dense(self) -> bool:
        """Whether the strides are those of a permuted contiguous tensor."""
        # Without strides (sparse, nested) there are no dimensions to look at: nothing is known to be otherwise.
        dimensions = zip(self.stride, self.shape, strict=False)
        return _leaves_no_holes(sorted(dimensions))

    def is_contiguous(self) -> bool:
        """Whether the strides are those of a new tensor."""
        return _leaves_no_holes(zip(reversed(self.stride), reversed(self.shape), strict=False))

    def pattern(self) -> Tensor:
        """A tensor like it on the meta device."""
        if len(self.stride) != len(self.shape):
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def _leaves_no_holes(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether each dimension (stride, size), from the innermost on, begins where those before it end."""
    expected = 1
    for stride, size in dimensions:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class TensorSpec:
    """What a receiver has to know about a tensor before it arrives.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether a gradient comes back for it in training.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __post_init__(self) -> None:
        if self.requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise ValueError(f"{self}: tensors of this dtype have no gradient; use requires_grad=False")

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """What a receiver has to know of ``tensor`` to allocate it."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Memory on ``device`` for such a tensor, to receive it in; what is in it has no meaning."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


Boundary = Sequence[TensorSpec]
"""What one stage sends to the next for one micro-batch."""


@dataclass
class Shapes:
    """What values and constants look like for micro-batches of one signature.

    Attributes:
        values: of the graph, by number.
        constants: by node, for those that returned any: one entry for each leaf of the result, None for tensors.
        remote_tensors: made so far, by value: one object serves all micro-batches.
    """

    values: dict[int, Shape] = field(default_factory=dict)
    constants: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    remote_tensors: dict[int, RemoteTensor] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: StepGraph) -> Shapes:
        """The shapes of all values of a traced step, which hold until a micro-batch has another shape."""
        values: dict[int, Shape] = {}
        for value in graph.values:
            values[value.index] = Shape(value.shape, value.stride, value.dtype, value.requires_grad)
        return cls(values)

    def merge(self, other: Shapes) -> None:
        """Take over what ``other`` knows."""
        self.values.update(other.values)
        self.constants.update(other.constants)
        self.remote_tensors.clear()

    def to_json(self) -> dict[str, Any]:
        """As plain data, to be passed on to other ranks."""
        values: dict[str, Any] = {}
        for index, known in self.values.items():
            values[str(index)] = [
                list(known.shape),
                list(known.stride),
                name_of_dtype(known.dtype),
                known.requires_grad,
            ]
        constants: dict[str, Any] = {}
        for index, found in self.constants.items():
            constants[str(index)] = [_to_json(leaf) for leaf in found]
        return {"values": values, "constants": constants}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Shapes:
        """The inverse of :meth:`to_json`; constants that are no JSON are taken from the trace."""
        values = {}
        for index, (shape, stride, dtype, requires_grad) in data["values"].items():
            values[int(index)] = Shape(
                tuple(shape),
                tuple(stride),
                dtype_of(dtype),
                bool(requires_grad),
            )
        constants = {}
        for index, found in data["constants"].items():
            constants[int(index)] = tuple(found)
        return cls(values, constants)

    def remote_tensor(self, value: int) -> RemoteTensor:
        """The stand-in for ``value``, made once."""
        made = self.remote_tensors.get(value)
        if made is None:
            if value not in self.values:
                raise ReplayError(f"The shape of value {value} is not known: the stage that makes it must run first.")
            # The same object in all runs, so each run marks it anew: see `StageValues.value_of`.
            pattern = self.values[value].pattern()
            made = pattern.as_subclass(RemoteTensor)
            made.value = value
            made.pattern = pattern
            self.remote_tensors[value] = made
        return made


def _to_json(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    return AS_TRACED


def count_told(nodes: Sequence[Node]) -> int:
    """How many numbers are read at ``nodes``."""
    return sum(len(node.returned.sources) for node in nodes)


def write_told(nodes: Sequence[Node], results: Mapping[int, Any], device: torch.device) -> Tensor:
    """What was read at each of ``nodes``, as one tensor."""
    # Every number travels as 64 bits, floats by their bit pattern: one tensor for all kinds, and nothing is rounded.
    # How many there are and of which kind, the receiver knows from the trace.
    numbers = []
    for node in nodes:
        found = leaves(results[node.index])
        for leaf, (_, traced) in zip(found, node.returned.sources, strict=True):
            if type(leaf) is not type(traced):
                raise ReplayError(
                    f"At {node.location} Python read {leaf!r}, a {type(leaf).__name__}; when the step was traced "
                    f"it was a {type(traced).__name__}."
                )
            numbers.append(_bits(leaf))
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def read_told(nodes: Sequence[Node], message: Tensor) -> dict[int, Any]:
    """The inverse of :func:`write_told`, by node."""
    numbers = iter(message.tolist())
    results = {}
    for node in nodes:
        found = [_number(next(numbers), traced) for _, traced in node.returned.sources]
        results[node.index] = rebuild(node.returned.skeleton, found)
    return results


def _bits(number: Any) -> int:
    if isinstance(number, float):
        return bits_of(number)
    return int(number)


def _number(bits: int, traced: Any) -> Any:
    """Of the kind that it was when the step was traced."""
    if isinstance(traced, float):
        return float_of(bits)
    return type(traced)(bits)
