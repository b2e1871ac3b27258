"""A traced step as a list of nodes: calls of units, and the operations between them.

A *unit* is a module whose calls are placed whole: the outermost modules that are small enough and that can be replaced
by what they return. Everything a unit does is one node, every bound operation outside of units is another. A stage is a
contiguous range of nodes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_smddp.pipeline.capture.records import Changes, Names, OutputSpec, StepFacts, Values


class SplitError(ValueError):
    """The step cannot be cut into stages as it is; the message says where and what to do."""


@dataclass
class Node:
    """A call of a unit (``module`` is its name) or an operation between units (``module`` is None).

    Attributes:
        inputs: values made before that it uses.
        outputs: values it makes that others may use.
        versions: tensors that it changes in place and that exist outside of it.
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
        is_seeded: whether it is a call of a unit that draws, or comes behind draws.
    """

    index: int
    name: str
    inputs: Values
    outputs: Values
    versions: Changes
    parameters: Names
    buffers: Names
    buffers_read: Names
    returned: OutputSpec
    random: bool
    location: str
    seconds: float
    activation_bytes: int
    varies: bool
    region: int | None
    module: str | None = None
    function: Any = None
    recomputable: bool = False
    reads: bool = False
    free: bool = False
    entry: tuple[int | None, ...] = ()
    is_seeded: bool = False


class Colocation(NamedTuple):
    """Nodes that must be on one stage: no stage may begin at ``first + 1 .. last``."""

    first: int
    last: int
    reason: str


@dataclass
class StepGraph(StepFacts):
    """The nodes of a step in order, and the values between them.

    Attributes:
        units: their names, in the order of their first calls.
        colocations: which nodes must stay together.
        cast_type: what weights are cast to, if their copies may be kept; see :func:`cast_type`.
        drawing: modules that draw random numbers, or are called behind draws: each call is seeded.
        repeats_draws: whether draws of all stages follow one stage's own, which the others repeat for nothing.
        calls_compiled: whether code between units is compiled.
        calls_apply: whether there are ``autograd.Function``s between units, or regions of ``torch.utils.checkpoint``.
        producers: value -> the node that makes it.
        last_use: value -> the last node that uses it.
        overwritten: value -> the first node that changes its memory. From there on it is gone.
        next_unit: node -> the first unit there or behind.
        unit_names: the units, as a set.
        possible_cuts: see :func:`~lightning_smddp.pipeline.capture.boundaries.possible_cuts`; None until it is asked.
    """

    nodes: list[Node] = field(default_factory=list)
    units: Names = ()
    colocations: list[Colocation] = field(default_factory=list)
    cast_type: torch.dtype | None = None
    drawing: frozenset[str] = frozenset()
    repeats_draws: bool = False
    calls_compiled: bool = False
    calls_apply: bool = False
    producers: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    overwritten: dict[int, int] = field(default_factory=dict)
    next_unit: list[int] = field(default_factory=list)
    unit_names: frozenset[str] = frozenset()
    possible_cuts: list[int] | None = None

    def __post_init__(self) -> None:
        """Find who makes, uses and overwrites each value."""
        in_storage: dict[int, list[int]] = defaultdict(list)  # the values in it that are still there
        for node in self.nodes:
            self.last_use.update(dict.fromkeys(node.inputs, node.index))
            # Before the node's outputs are added: these are what its changes in place have made of the old values.
            for storage in {self.values[version.new].storage for version in node.versions}:
                self.overwritten.update(dict.fromkeys(in_storage.pop(storage, ()), node.index))
            for value in node.outputs:
                self.producers.setdefault(value, node.index)
                in_storage[self.values[value].storage].append(value)
        # What the step returns is used behind its last node: it crosses every cut behind the node that makes it.
        returned = self.producers.keys() & self.returned
        self.last_use.update(dict.fromkeys(returned, len(self.nodes)))
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
            # Who made those of the tensors changed in it that the node was given, or that are used later.
            changed = [old for old, new, position in node.versions if position is not None or new in self.last_use]
            makers = [self.producers[old] for old in changed if old in self.producers]
            if len(makers) > 1:
                reason = f"{node.name} changes a tensor in place of which views are used later"
                self.colocations.append(Colocation(min(makers), node.index, reason))

    def _colocate_buffers(self) -> None:
        """A buffer lives on the stage that changes it."""
        # Who only reads it has to be there, too: on another stage it would read what the buffer was before the step.
        first_users: dict[str, Node] = {}
        for node in self.nodes:
            for name in {*node.buffers, *node.buffers_read}:
                first = first_users.setdefault(name, node)
                reason = f"{first.name} and {node.name} use buffer {name!r}, which the step changes"
                self.colocations.append(Colocation(first.index, node.index, reason))

    def needed_after(self, cut: int) -> list[int]:
        """Values made before node ``cut`` and used by it or later ones."""
        return [value for value, last in self.last_use.items() if self.producers[value] < cut <= last]

    def nbytes(self, values: Iterable[int]) -> int:
        """Bytes of contiguous copies."""
        return sum(self.values[value].nbytes for value in values)

    def digest(self) -> str:
        """The same on every rank that traced the same step. Checkpoints have it."""
        lines = []
        for node in self.nodes:
            inputs = ",".join(map(str, node.inputs))
            outputs = ",".join(map(str, node.outputs))
            lines.append(f"{node.name}({inputs})->{outputs}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
