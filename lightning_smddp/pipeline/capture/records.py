"""The record of one run of a step, as plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.ops import name_of

T = TypeVar("T")
Values: TypeAlias = tuple[int, ...]
"""Indices of values, each once."""
Names: TypeAlias = tuple[str, ...]
"""First names of modules, parameters or buffers, each once."""

OPAQUE: Final = "opaque"  # an operation that torch's function modes do not see

# Operations that return a tensor whose size depends on values: of all arguments,
_OF_ALL = {"argwhere", "nonzero", "unique", "unique_consecutive"}
# of the only argument, where it has no other one,
_OF_ALL_IF_ALONE = {"where", "repeat_interleave"}
# and of what comes behind the first argument. (Of rows that were packed the lengths have decided already.)
_OF_THE_REST = {"masked_select", "repeat_interleave", "_pack_padded_sequence"}


class TensorSpec(NamedTuple):
    """What is known of a tensor without having it.

    Attributes:
        shape: ``()`` of nested ones.
        dtype: of its elements.
        requires_grad: of one that is sent, whether a gradient comes back for it.
        stride: in elements, if it is known. Sparse and nested tensors have none.
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
class Value:
    """A tensor that a bound operation made.

    ``storage`` numbers its storage: values with the same number are views of each other. Sparse and nested tensors are
    not ``sendable``. ``varies``: its size depends on values that a module made.
    """

    index: int
    event: int
    spec: TensorSpec
    storage: int
    sendable: bool
    varies: bool

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous copy."""
        return self.spec.dtype.itemsize * math.prod(self.spec.shape)


@dataclass(frozen=True)
class OutputSpec:
    """What a call returned, for building it again: containers, and for each leaf where it comes from.

    A leaf is ``("value", index)``, ``("argument", position among the arguments' leaves)`` or ``("constant", object)``.
    The skeleton of a bare tensor is ``...``.
    """

    skeleton: Any = None
    sources: tuple[tuple[str, Any], ...] = ()

    @property
    def values(self) -> Values:
        """The values among the leaves."""
        return tuple(source for kind, source in self.sources if kind == "value")


class InPlaceVersion(NamedTuple):
    """A tensor that was ``old`` (None: free) and is ``new`` after a change in place."""

    old: int | None
    new: int
    position: int | None  # among the arguments' leaves; None for another view of the same memory


Calls: TypeAlias = "tuple[Call, ...]"
"""Of modules, each made in the one before."""
Changes: TypeAlias = tuple[InPlaceVersion, ...]
"""What an operation or a call of a module changes in place."""


@dataclass
class Event:
    """A bound operation. ``calls`` are the module calls that it was made in; ``mutated`` are the tensors it changed."""

    index: int
    function: Any
    calls: Calls
    location: str
    inputs: Values
    parameters: Names
    returned: OutputSpec = OutputSpec()
    made: Values = ()
    mutated: Changes = ()
    buffers: Names = ()  # that it changed
    buffers_read: Names = ()  # of those that the step changes somewhere
    random: bool = False
    is_seeded: bool = False  # random, and drawn from generators that seeds are given to
    behind_draws: tuple[Any, ...] = ()  # free and seeded: functions that drew for one stage, no module between
    free: bool = False  # no bound input: known by its function
    reads: bool = False
    sized_by_module: bool = False  # the size of its result depends on values that a module made
    region: int | None = None  # the user's own torch.utils.checkpoint that it is within, by number
    compiled: bool = False  # in code that torch.compile was asked to compile
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The function's name in torch."""
        return OPAQUE if self.function is OPAQUE else name_of(self.function)


@dataclass(eq=False)
class Call:
    """A call of a module's forward, made in other ``calls``; its events are ``[first, last)``."""

    module: str
    calls: Calls
    first: int
    last: int = -1
    returned: OutputSpec = OutputSpec()
    entry: tuple[int | None, ...] = ()  # the value that each leaf of its arguments is, as it begins
    not_placeable: str | None = None  # why it cannot be a unit
    is_seeded: bool = False  # it draws, or comes behind draws
    reads: bool = False  # Python saw values of tensors in it, or drew random numbers
    seconds: float = 0.0  # of the operations in it


class GradientHook(NamedTuple):
    """A hook that the step's code registers on the gradient of a value.

    ``event``: the one that comes next; ``calls``: the module calls that it is registered in.
    """

    value: int
    event: int
    calls: Calls
    location: str


@dataclass
class StepFacts:
    """What is known of a step, whatever its units are.

    Attributes:
        values: all tensors that bound operations made.
        returned: the values that the step returned.
        reads_batch: whether Python code reads a value of the batch: sizes or control flow may depend on it.
        draws: whether it draws random numbers of Python's or numpy's: all stages draw the same ones between units.
        external_writes: where it writes tensors in place that were there before it, see ``preserve_state.py``.
    """

    values: list[Value] = field(default_factory=list)
    returned: Values = ()
    reads_batch: bool = False
    draws: bool = False
    external_writes: tuple[str, ...] = ()


@dataclass
class Trace(StepFacts):
    """The record.

    Attributes:
        changed_buffers: first names of buffers that the step changes.
        refusals: messages about what it does that no pipeline can do.
        hooks: on gradients of values.
        drawing: names of modules that draw, or are called behind draws.
        casts: how often a parameter, by its first name, was copied in which other type.
    """

    events: list[Event] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    changed_buffers: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)
    hooks: list[GradientHook] = field(default_factory=list)
    drawing: set[str] = field(default_factory=set)
    casts: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)


def each_once(*sequences: Iterable[T | None]) -> tuple[T, ...]:
    """The members of all ``sequences`` that are not None, each once, in the order of their first appearance."""
    return tuple(dict.fromkeys(one for one in chain.from_iterable(sequences) if one is not None))


# What they return is as large as their first argument, however many rows are put into it.
PUTS_ROWS_BACK = {"index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "masked_scatter"}


def deciding_tensors(name: str, arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors whose values decide on the size of what an operation returns. ``arguments`` are its leaves."""
    given = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
    if name in _OF_ALL or (len(arguments) == 1 and name in _OF_ALL_IF_ALONE):
        return given
    if name in _OF_THE_REST:
        return given[1:]
    if name == "__getitem__":
        # `x[mask]` has as many entries as the mask has True ones; an index of integers says the size by its own.
        return [tensor for tensor in given[1:] if tensor.dtype is torch.bool]
    return []
