"""The record of one run of a step, as plain data, and what it says: of modules, and of sizes that depend on values.

Stages that do not have those values do not know such a size. Where they are the batch's, every stage has them, and each
size is another path. Where they are a module's, only the stage that made them can follow.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.ops import name_of

HIDDEN: Final = "hidden"  # an operation that torch's function modes do not see

# Operations that return a tensor whose size depends on values: of all arguments,
_OF_ALL = {"argwhere", "nonzero", "unique", "unique_consecutive"}
# of the only argument, where it has no other one,
_OF_ALL_IF_ALONE = {"where", "repeat_interleave"}
# and of what comes behind the first argument. (Of rows that were packed the lengths have decided already.)
_OF_THE_REST = {"masked_select", "repeat_interleave", "_pack_padded_sequence"}

# Their statistics are of micro-batches, which is said elsewhere.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class Value:
    """A tensor that a bound operation made. Strides are elements.

    ``memory`` numbers its storage: values with the same number are views of each other. ``watched``: the user has
    registered a hook on its gradient. Sparse and nested tensors have no strides and are not ``sendable``.
    """

    index: int
    event: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    memory: int = -1
    watched: bool = False
    sendable: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous copy."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Template:
    """What a call returned, for building it again: containers, and for each leaf where it comes from.

    A leaf is ``("value", index)``, ``("argument", position among the arguments' leaves)`` or ``("constant", object)``.
    The skeleton of a bare tensor is ``...``.
    """

    skeleton: Any
    sources: tuple[tuple[str, Any], ...]

    @property
    def values(self) -> tuple[int, ...]:
        """The values among the leaves."""
        return tuple(source for kind, source in self.sources if kind == "value")


class Deciding(Enum):
    """Whose values decide on a size."""

    BATCH = "batch"
    MODULE = "module"


class Rebind(NamedTuple):
    """A tensor that was ``old`` (None: free) and is ``new`` after a change in place."""

    old: int | None
    new: int
    position: int | None  # among the arguments' leaves; None for another view of the same memory


@dataclass
class Event:
    """A bound operation. ``call`` is the module call that it was made in; ``mutated`` are the tensors it changed."""

    index: int
    function: Any
    inputs: tuple[int, ...]
    parameters: tuple[str, ...]
    call: int | None
    location: str
    returned: Template
    mutated: tuple[Rebind, ...] = ()
    buffers: tuple[str, ...] = ()  # that it changed
    buffers_read: tuple[str, ...] = ()  # of those that the step changes somewhere
    parameters_changed: tuple[str, ...] = ()  # in place
    random: bool = False
    is_seeded: bool = False  # random, and drawn from generators that seeds are given to
    free: bool = False  # no bound input: known by its function
    reads: bool = False
    decided_by: Deciding | None = None  # whose values the size of its result depends on
    batch_sizes: frozenset[int] = frozenset()  # sizes of free tensors that it takes which depend on the batch's values
    checkpointed: bool = False  # within the user's own torch.utils.checkpoint
    region: int | None = None  # which one, by number
    compiled: bool = False  # in code that torch.compile was asked to compile
    reason: str = ""  # of a hidden one
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The function's name in torch, or that of the hidden region that it stands for."""
        if self.function is HIDDEN:
            return HIDDEN
        return name_of(self.function)


@dataclass
class Call:
    """A call of a module's forward; its events are ``[first, last)``."""

    index: int
    module: str
    parent: int | None
    first: int
    last: int = -1
    returned: Template | None = None
    entry: tuple[int | None, ...] = ()  # the value that each leaf of its arguments is, as it begins
    obstacle: str | None = None  # why it cannot be a unit
    draws_in_python: bool = False  # Python's or numpy's random numbers, in its own code
    reads: bool = False  # Python saw values of tensors in it
    reads_bound: bool = False  # and of bound ones
    has_children: bool = False
    sizes_by_batch: bool = False  # the batch's values decide on the size of a tensor that is made in it
    checkpointed: bool = False
    has_backward_hooks: bool = False
    seconds: float = 0.0


@dataclass
class Trace:
    """The record.

    Attributes:
        changed_buffers: first names of buffers that the step changes.
        buffers_used: first name of a buffer -> names of the innermost modules whose code uses it; empty for the step's.
        returned: the values that the step returned.
        draws_in_python: Python's or numpy's random numbers, in the step's own code, outside of any module.
        backward_locations: where the step starts a backward pass of its own.
        collective_locations: where it calls a collective of its own.
        hooked_locations: where it registers hooks on parameters.
        rebound_buffers: first names of buffers that were replaced by other tensors (`self.buffer = ...`).
        reads_of_batch: where Python code read a value of the batch: sizes or the course may depend on it.
        foreign_writes: where it writes tensors in place that were there before it, see ``foreign_writes.py``.
        casts: how often a parameter, by its first name, was copied in which other type.
    """

    events: list[Event] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    changed_buffers: frozenset[str] = frozenset()
    buffers_used: dict[str, set[str]] = field(default_factory=dict)
    returned: tuple[int, ...] = ()
    draws_in_python: bool = False
    backward_locations: list[str] = field(default_factory=list)
    collective_locations: list[str] = field(default_factory=list)
    hooked_locations: list[str] = field(default_factory=list)
    rebound_buffers: tuple[str, ...] = ()
    reads_of_batch: list[str] = field(default_factory=list)
    foreign_writes: tuple[str, ...] = ()
    seconds: float = 0.0
    casts: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)


def deciding_tensors(name: str, arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors whose values decide on the size of what an operation returns. ``arguments`` are its leaves."""
    if name == "__getitem__":
        # `x[mask]` has as many entries as the mask has True ones; an index of integers says the size by its own.
        return [leaf for leaf in arguments[1:] if isinstance(leaf, Tensor) and leaf.dtype is torch.bool]
    is_alone = len(arguments) == 1 and name in _OF_ALL_IF_ALONE
    if is_alone or name in _OF_ALL:
        return [leaf for leaf in arguments if isinstance(leaf, Tensor)]
    if name in _OF_THE_REST:
        return [leaf for leaf in arguments[1:] if isinstance(leaf, Tensor)]
    return []


def varying(trace: Trace, root: nn.Module, deciding: Deciding) -> frozenset[int]:
    """The values of a trace whose size depends on values, those of ``deciding``.

    What is made of such a tensor may be of a fixed size again: a mean, or rows that are put back in their places. So
    sizes are told by their numbers: one that also belongs to parameters or to other values is fixed, unless it is one
    of those that vary.
    """
    made: dict[int, list[int]] = defaultdict(list)  # event -> values
    for value in trace.values:
        made[value.event].append(value.index)
    fixed = {1}
    for parameter in root.parameters():
        fixed.update(parameter.shape)
    # In the order of the step: the sizes that vary in each value follow from those in the values it is made of.
    found: dict[int, frozenset[int]] = {}
    for event in trace.events:
        given: set[int] = set()
        for index in event.inputs:
            given.update(found.get(index, ()))
        if deciding is Deciding.BATCH:
            given |= event.batch_sizes
        before = {rebind.new: rebind.old for rebind in event.mutated}
        for index in made[event.index]:
            shape = trace.values[index].shape
            sizes: frozenset[int] = frozenset()
            if index not in before:
                sizes = sizes_that_vary(shape, given, fixed, event.decided_by is deciding)
            else:
                old = before[index]
                if old is not None:  # a change in place changes no size
                    sizes = found.get(old, sizes)
            if sizes:
                found[index] = sizes
            else:
                fixed.update(shape)
    return frozenset(found)


def sizes_that_vary(
    shape: Sequence[int],
    given: Set[int],
    fixed: Set[int],
    makes: bool,
) -> frozenset[int]:
    """Those of a result's sizes that vary, if ``given`` ones of its arguments do, or if it ``makes`` such a size."""
    if not (given or makes):
        return frozenset()
    varying = frozenset(size for size in shape if size in given or size not in fixed)
    if makes and not varying:
        return frozenset(shape[:1])  # all rows may have been chosen, this time
    return varying


def changes_of_state(trace: Trace, modules: Modules) -> tuple[str, ...]:
    """What a step changes that later steps see, but for BatchNorm's statistics: each change and where it is."""
    found: dict[str, None] = {}  # in order
    for event in trace.events:
        if any(isinstance(module, _BATCH_NORMS) for module in modules.around(event)):
            continue
        for name in event.parameters_changed:
            found[f"parameter {name!r} at {event.location}"] = None
        for name in event.buffers:
            found[f"buffer {name!r} at {event.location}"] = None
    return tuple(found)


class Modules:
    """What the trace says about each module: may it be a unit, may it be opened."""

    def __init__(self, trace: Trace, root: nn.Module) -> None:
        self.trace = trace
        self.root = root
        self.by_name = dict(root.named_modules())
        self.calls: dict[str, list[Call]] = defaultdict(list)  # by module
        # call -> the calls that it was made in, from the outside in, and itself. A parent comes before its children.
        self.chains: dict[int | None, tuple[int, ...]] = {None: ()}
        for call in trace.calls:
            self.calls[call.module].append(call)
            self.chains[call.index] = (*self.chains[call.parent], call.index)
        self.obstacles: dict[str, str] = {}  # module -> why it cannot be a unit
        self.must_be_whole: dict[str, str] = {}  # module -> why it cannot be opened
        self.better_whole: dict[str, str] = {}  # module -> why it is opened only where there are too few units else
        self.varying = varying(trace, root, Deciding.MODULE)
        # In this order: the last one seals modules that have no obstacle, so all of these have to be known.
        self._find_escapes()
        self._judge_calls()
        self._judge_events()

    def seconds(self, name: str) -> float:
        """Forward time of all calls of a module."""
        return sum(call.seconds for call in self.calls[name])

    def around(self, event: Event) -> list[nn.Module]:
        """The modules that were being called when ``event`` was recorded, from the outside in."""
        modules = []
        for index in self.chains[event.call]:
            name = self.trace.calls[index].module
            modules.append(self.by_name[name])
        return modules

    def _judge_calls(self) -> None:
        """Modules whose calls other stages could not stand in for are no units."""
        by_batch = set()
        for call in self.trace.calls:
            if call.obstacle is not None:
                self.obstacles.setdefault(call.module, call.obstacle)
            if call.sizes_by_batch:
                by_batch.add(call.module)
        for name, calls in self.calls.items():
            if not all(map(_has_events, calls)):
                self.obstacles.setdefault(name, "its result depends on the batch alone")
        # A stage that does not run the module would not know the size of what it returns. Opened, its code runs on all
        # stages, and these have the batch whose values decide.
        varying_with_batch = varying(self.trace, self.root, Deciding.BATCH)
        for name in by_batch & self._returning(varying_with_batch):
            self.obstacles.setdefault(name, "the size of its result depends on the batch's values")

    def _judge_events(self) -> None:
        """Modules that do what cannot be followed from outside are not opened."""
        leaking = self._returning(self.varying)
        last_begin = max((call.first for call in self.trace.calls), default=0)
        for event in self.trace.events:
            if event.call is None:
                continue
            name = self.trace.calls[event.call].module
            if event.function is HIDDEN:
                self.must_be_whole[name] = event.reason
            elif event.parameters_changed:
                self.must_be_whole[name] = f"it changes parameter {event.parameters_changed[0]!r} in place"
            elif event.index >= last_begin:
                continue  # what comes behind the last module is the last stage's alone
            elif event.reads and not event.free:
                self._seal_around(event, self.better_whole, f"it reads a tensor's value in {event.location}")
            elif event.decided_by is Deciding.MODULE:
                # A module that returns such a tensor is no help: whoever calls it does not know the size either.
                reason = f"it makes a tensor in {event.location}, and its size depends on values that a module made"
                self._seal_around(event, self.must_be_whole, reason, leaking)

    def _returning(self, values: frozenset[int]) -> set[str]:
        """The modules that return some of ``values``, made in them."""
        found = set()
        for call in self.trace.calls:
            if call.returned is None:
                continue
            returned = values.intersection(call.returned.values)
            if any(self.made_in(value, call.index) for value in returned):
                found.add(call.module)
        return found

    def _seal_around(self, event: Event, sealed: dict[str, str], reason: str, unfit: Collection[str] = ()) -> None:
        """The innermost module that can be placed whole, and is not ``unfit``, is ``sealed``."""
        for index in reversed(self.chains[event.call]):
            name = self.trace.calls[index].module
            if name and name not in self.obstacles and name not in unfit:
                sealed.setdefault(name, reason)
                return

    def _find_escapes(self) -> None:
        """Values used outside of the call that made them, without being returned by it."""
        # Hooks that collect tensors, and attributes that later code reads, hand values over in other ways. A stage that
        # does not run the module would not have them: such a module is no unit, and is opened until somebody returns
        # the tensor.
        handed_over: dict[int, set[int]] = {}  # by call: what its caller gets, as a result or by a change in place
        for call in self.trace.calls:
            changed = {rebind.new for rebind in self.changes(call)}
            if call.returned is not None:
                changed.update(call.returned.values)
            handed_over[call.index] = changed
        for event in self.trace.events:
            around = set(self.chains[event.call])
            for value in event.inputs:
                for index in self._calls_around_maker(value):
                    if index in around or value in handed_over[index]:
                        continue
                    name = self.trace.calls[index].module
                    where = f"{event.location} without being returned"
                    self.obstacles.setdefault(name, f"a tensor made in it is used at {where}")

    def changes(self, call: Call) -> tuple[Rebind, ...]:
        """Tensors made outside of ``call`` that it changes in place: what they were before it, and are after it."""
        # A tensor that is changed twice, a -> b -> c, is one change from a to c: found by what it is now.
        before: dict[int, tuple[int, int | None]] = {}  # what a tensor is now -> (what it was before, position)
        for event in self.trace.events[call.first : call.last]:
            for old, new, position in event.mutated:
                if old is None:
                    continue
                if old in before:
                    before[new] = before.pop(old)
                elif not self.made_in(old, call.index):
                    before[new] = (old, position)
        changes = []
        for new, (old, position) in before.items():
            changes.append(Rebind(old, new, position))
        return tuple(changes)

    def made_in(self, value: int, call: int) -> bool:
        """Whether an operation within ``call`` made ``value``."""
        return call in self._calls_around_maker(value)

    def _calls_around_maker(self, value: int) -> tuple[int, ...]:
        """The calls within which ``value`` was made, from the outside in."""
        event = self.trace.values[value].event
        return self.chains[self.trace.events[event].call]


def _has_events(call: Call) -> bool:
    """Whether something bound was done in it, and it has returned."""
    return call.last > call.first and call.returned is not None
