"""A traced step as a list of nodes: calls of units, and the operations between them.

A *unit* is a module whose calls are placed whole: the outermost modules that are small enough and that can be replaced
by what they return. Everything a unit does is one node, every bound operation outside of units is another. A stage is a
contiguous range of nodes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from lightning_smddp.pipeline.capture.records import InPlaceVersion, OutputSpec, Value


class SplitError(ValueError):
    """The step cannot be cut into stages as it is; the message says where and what to do."""


@dataclass
class Node:
    """A call of a unit (``module`` is its name) or an operation between units (``module`` is None).

    Attributes:
        inputs: values made before that it uses.
        outputs: values it makes that others may use.
        rebinds: tensors that it changes in place and that exist outside of it.
        parameters: first names of the parameters that it uses or holds.
        buffers: names of buffers that it changes.
        buffers_read: of those that the step changes somewhere, names of buffers that it reads.
        returned: how what it returns is built of its outputs, its arguments and constants.
        random: whether torch draws random numbers in it.
        location: the user's line that calls it first.
        seconds: of its forward, as traced.
        activation_bytes: of all values made in it.
        recomputable: whether a later stage may do it again instead of receiving its result.
        reads: whether Python code gets to see a value of its inputs.
        free: whether it depends on no parameter and no other node. It is one as it draws numbers or changes a buffer.
        varies: whether it makes a tensor whose size depends on values that a module made.
        entry: of a unit, the value that each leaf of its arguments is; None for other leaves.
        region: the region of ``torch.utils.checkpoint`` that it is in, by number.
        is_seeded: whether this call of a unit draws, or comes behind draws.
    """

    index: int
    name: str
    inputs: tuple[int, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    buffers_read: tuple[str, ...]
    random: bool
    location: str
    activation_bytes: int
    region: int | None
    module: str | None = None
    function: Any = None
    outputs: tuple[int, ...] = ()
    rebinds: tuple[InPlaceVersion, ...] = ()
    returned: OutputSpec = OutputSpec()
    seconds: float = 0.0
    recomputable: bool = False
    reads: bool = False
    free: bool = False
    varies: bool = False
    entry: tuple[int | None, ...] = ()
    is_seeded: bool = False


class Colocation(NamedTuple):
    """Nodes that must be on one stage: no stage may begin at ``first + 1 .. last``."""

    first: int
    last: int
    reason: str


@dataclass
class StepGraph:
    """The nodes of a step in order, and the values between them.

    Attributes:
        producers: value -> the node that makes it.
        last_use: value -> the last node that uses it.
        overwritten: value -> the first node that changes its memory. From there on it is gone.
        colocations: which nodes must stay together.
        reads_of_batch: where Python code reads values of the batch (``file:line``): shapes may depend on them.
        returned: the values that the step returns.
        draws: whether its code draws random numbers in Python: all stages have to draw the same ones between units.
        foreign_writes: see :class:`Trace`.
        cast_type: what weights are cast to, if their copies may be kept; see :func:`cast_type`.
        buffers_used: see :class:`Trace`.
        drawing: modules that draw random numbers, or are called behind draws: each call is seeded.
        mixes_draws: whether several draws between the same modules are seeded one by one, as not all stages do all.
        calls_compiled: whether code between units is compiled.
        calls_apply: whether there are ``autograd.Function``s between units, or regions of ``torch.utils.checkpoint``.
        next_unit: node -> the first unit there or behind.
        unit_names: the units, as a set.
        possible_cuts: see :func:`~lightning_smddp.pipeline.capture.boundaries.possible_cuts`; None until it is asked.
    """

    nodes: list[Node]
    values: list[Value]
    units: tuple[str, ...]
    producers: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    overwritten: dict[int, int] = field(default_factory=dict)
    colocations: list[Colocation] = field(default_factory=list)
    reads_of_batch: tuple[str, ...] = ()
    returned: tuple[int, ...] = ()
    draws: bool = False
    foreign_writes: tuple[str, ...] = ()
    cast_type: torch.dtype | None = None
    buffers_used: Mapping[str, Set[str]] = field(default_factory=dict)
    drawing: frozenset[str] = frozenset()
    mixes_draws: bool = False
    calls_compiled: bool = False
    calls_apply: bool = False
    next_unit: list[int] = field(default_factory=list)
    unit_names: frozenset[str] = frozenset()
    possible_cuts: list[int] | None = None

    def __post_init__(self) -> None:
        """Find who makes, uses and overwrites each value."""
        in_storage: dict[int, list[int]] = defaultdict(list)  # the values in it that are still there
        for node in self.nodes:
            self.last_use.update(dict.fromkeys(node.inputs, node.index))
            # Before the node's outputs are added: these are what its changes in place have made of the old values.
            for storage in {self.values[version.new].storage for version in node.rebinds}:
                self.overwritten.update(dict.fromkeys(in_storage.pop(storage, ()), node.index))
            for value in node.outputs:
                self.producers.setdefault(value, node.index)
                in_storage[self.values[value].storage].append(value)
        # What the step returns is used behind its last node: it crosses every cut behind the node that makes it.
        for value in self.returned:
            if value in self.producers:
                self.last_use[value] = len(self.nodes)
        self._colocate_views()
        self._colocate_buffers()
        self.unit_names = frozenset(self.units)
        self.next_unit = [len(self.nodes)] * (len(self.nodes) + 1)
        for node in reversed(self.nodes):
            following = self.next_unit[node.index + 1]
            self.next_unit[node.index] = following if node.module is None else node.index

    def _colocate_views(self) -> None:
        """A change in place reaches all views of the memory only where they still are views of each other."""
        for node in self.nodes:
            # By storage: who made those of the tensors changed in it that the node was given, or that are used later.
            makers: dict[int, list[int]] = defaultdict(list)
            for old, new, position in node.rebinds:
                if old not in self.producers:
                    continue
                if position is not None or new in self.last_use:
                    makers[self.values[new].storage].append(self.producers[old])
            reason = f"{node.name} changes a tensor in place of which views are used later"
            for producers in makers.values():
                first = min(producers)
                if len(producers) > 1 and first < node.index:
                    self.colocations.append(Colocation(first, node.index, reason))

    def _colocate_buffers(self) -> None:
        """A buffer lives on the stage that changes it."""
        # Who only reads it has to be there, too: on another stage it would read what the buffer was before the step.
        users: dict[str, list[int]] = defaultdict(list)
        for node in self.nodes:
            for name in {*node.buffers, *node.buffers_read}:
                users[name].append(node.index)
        for name, indices in users.items():
            first, last = self.nodes[indices[0]], self.nodes[indices[-1]]
            reason = f"{first.name} and {last.name} use buffer {name!r}, which the step changes"
            self.colocations.append(Colocation(first.index, last.index, reason))

    def needed_after(self, cut: int) -> list[int]:
        """Values made before node ``cut`` and used by it or later ones."""
        return [value for value, last in self.last_use.items() if self.producers[value] < cut <= last]

    def digest(self) -> str:
        """The same on every rank that traced the same step."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def lines(self) -> list[str]:
        """A line for each node."""
        lines = []
        for node in self.nodes:  # checkpoints have digests of these
            inputs = ",".join(map(str, node.inputs))
            outputs = ",".join(map(str, node.outputs))
            lines.append(f"{node.name}({inputs})->{outputs}")
        return lines


def first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[int, str, str]:
    """The first position where two unlike sequences differ, and what each has there (``"the end"`` behind its last)."""
    pairs = enumerate(zip_longest(one, other, fillvalue="the end"))
    return next((position, here, there) for position, (here, there) in pairs if here != there)
