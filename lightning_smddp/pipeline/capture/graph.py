"""A traced step as a list of nodes: calls of units, and the operations between them.

A *unit* is a module whose calls are placed whole: the outermost modules that are small enough and that can be replaced
by what they return. Everything a unit does is one node, every bound operation outside of units is another. A stage is a
contiguous range of nodes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from lightning_smddp._compat.torch import BACKWARD_HOOK
from lightning_smddp.pipeline.capture.ops import is_autograd_function
from lightning_smddp.pipeline.capture.records import (
    HIDDEN,
    Call,
    Event,
    Modules,
    Rebind,
    Template,
    Trace,
    Value,
    changes_of_state,
)
from lightning_smddp.pipeline.runtime.casts import cast_type
from lightning_smddp.seeding import drawing_candidates

T = TypeVar("T")

IsSmall: TypeAlias = Callable[[str], bool]
"""Whether a module of this name may be a unit, if nothing else is against it."""


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
        checkpointed: whether the user's own code runs it in ``torch.utils.checkpoint``.
        draws_in_python: whether it is a unit whose code draws from the sources of ``PythonRandom``.
        call: of a unit, which one of the trace.
        entry: of a unit, the value that each leaf of its arguments is; None for other leaves.
        region: the region of ``torch.utils.checkpoint`` that it is in, by number.
        is_seeded: whether this call of a unit draws, or comes behind draws.
    """

    index: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rebinds: tuple[Rebind, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    buffers_read: tuple[str, ...]
    returned: Template
    random: bool
    location: str
    seconds: float
    activation_bytes: int
    name: str = ""
    module: str | None = None
    function: Any = None
    recomputable: bool = False
    reads: bool = False
    free: bool = False
    checkpointed: bool = False
    varies: bool = False
    draws_in_python: bool = False
    entry: tuple[int | None, ...] = ()
    call: int | None = None
    region: int | None = None
    is_seeded: bool = False


class Colocation(NamedTuple):
    """Items that must be on one stage: no stage may begin at ``first + 1 .. last``."""

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
        once_a_batch: what would happen once for each micro-batch instead of once for a batch, and where.
        foreign_writes: see :class:`Trace`.
        cast_type: what weights are cast to, if their copies may be kept; see :func:`cast_type`.
        buffers_used: see :class:`Trace`.
        drawing: modules that draw random numbers, or are called behind draws: each call is seeded.
        mixes_draws: whether several draws between the same modules are seeded one by one, as not all stages do all.
        calls_compiled: whether code between units is compiled.
        next_unit: node -> the first unit there or behind.
        unit_names: the units, as a set.
        possible_cuts: see :func:`~lightning_smddp.pipeline.capture.boundaries.possible_cuts`; None until it is asked.
    """

    nodes: list[Node]
    values: list[Value]
    units: tuple[str, ...]
    forward_seconds: float
    producers: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    overwritten: dict[int, int] = field(default_factory=dict)
    colocations: list[Colocation] = field(default_factory=list)
    reads_of_batch: tuple[str, ...] = ()
    returned: tuple[int, ...] = ()
    draws: bool = False
    once_a_batch: tuple[str, ...] = ()
    foreign_writes: tuple[str, ...] = ()
    cast_type: torch.dtype | None = None
    buffers_used: Mapping[str, Set[str]] = field(default_factory=dict)
    drawing: frozenset[str] = frozenset()
    mixes_draws: bool = False
    calls_compiled: bool = False
    next_unit: list[int] = field(default_factory=list)
    unit_names: frozenset[str] = frozenset()
    possible_cuts: list[int] | None = None

    def __post_init__(self) -> None:
        """Find who makes, uses and overwrites each value."""
        in_memory: dict[int, list[int]] = defaultdict(list)  # storage -> the values in it that are still there
        for node in self.nodes:
            for value in node.inputs:
                self.last_use[value] = node.index
            # Before the node's outputs are added: these are what its changes in place have made of the old values.
            changed = {self.values[rebind.new].memory for rebind in node.rebinds}
            for memory in changed:
                for value in in_memory.pop(memory, ()):
                    self.overwritten[value] = node.index
            for value in node.outputs:
                self.producers.setdefault(value, node.index)
                in_memory[self.values[value].memory].append(value)
        # What the step returns is used behind its last node: it crosses every cut behind the node that makes it.
        for value in self.returned:
            if value in self.producers:
                self.last_use[value] = len(self.nodes)
        self._colocate_views()
        self._colocate_buffers()
        self._colocate_unsendable()
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
                    memory = self.values[new].memory
                    makers[memory].append(self.producers[old])
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
            if len(indices) < 2:
                continue
            first = self.nodes[indices[0]]
            last = self.nodes[indices[-1]]
            reason = f"{first.name} and {last.name} use buffer {name!r}, which the step changes"
            self.colocations.append(Colocation(first.index, last.index, reason))

    def _colocate_unsendable(self) -> None:
        """A sparse or nested tensor has no strides, so it stays on the stage that makes it."""
        for value, last in self.last_use.items():
            if self.values[value].sendable:
                continue
            maker = self.nodes[self.producers[value]]
            reason = f"the sparse or nested result of {maker.name} cannot be sent"
            self.colocations.append(Colocation(maker.index, last, reason))

    def needed_after(self, cut: int) -> list[int]:
        """Values made before node ``cut`` and used by it or later ones."""
        used_later = [value for value, last in self.last_use.items() if last >= cut]
        return [value for value in used_later if self.producers[value] < cut]

    def difference_from(self, other: StepGraph) -> str:
        """The first node that is another one in ``other``, as a sentence."""
        names = [node.name for node in self.nodes]
        other_names = [node.name for node in other.nodes]
        _, here, there = first_difference(names, other_names)
        return f"It comes to {here} where {there} is expected."

    def digest(self) -> str:
        """The same on every rank that traced the same step."""
        text = "\n".join(self.lines())
        return hashlib.sha256(text.encode()).hexdigest()

    def lines(self) -> list[str]:
        """A line for each node."""
        lines = []
        for node in self.nodes:
            inputs = ",".join(map(str, node.inputs))
            outputs = ",".join(map(str, node.outputs))
            lines.append(f"{node.name}({inputs})->{outputs}")
        return lines


def first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[int, str, str]:
    """The first position where two sequences differ, and what each has there (``"the end"`` behind its last)."""
    for position, (here, there) in enumerate(zip_longest(one, other, fillvalue="the end")):
        if here != there:
            return position, here, there
    return len(one), "the end", "the end"


def build_graph(trace: Trace, modules: Modules, is_small: IsSmall) -> StepGraph:
    """Choose the units (outermost modules that may be one and are small) and list the nodes.

    Raises:
        SplitError: a module can neither be a unit nor be opened, or the step does what no split can follow.
    """
    # What no cut can make right is refused first, whatever the units are.
    _refuse(trace)
    _refuse_scripted(modules)
    builder = _Builder(trace, modules, is_small)
    builder.visit(None)
    units = dict.fromkeys(node.module for node in builder.nodes if node.module is not None)
    draws_in_python = trace.draws_in_python or any(call.draws_in_python for call in trace.calls)
    seeded_calls, mixes_draws = _seeded_calls(trace)
    for node in builder.nodes:
        node.is_seeded = node.call in seeded_calls
    drawing = {trace.calls[index].module for index in seeded_calls}
    return StepGraph(
        nodes=builder.nodes,
        values=trace.values,
        units=tuple(units),
        forward_seconds=trace.seconds,
        colocations=builder.backward_hooks(),
        returned=trace.returned,
        reads_of_batch=_unique(trace.reads_of_batch),
        draws=draws_in_python,
        once_a_batch=changes_of_state(trace, modules),
        foreign_writes=trace.foreign_writes,
        cast_type=cast_type(trace),
        buffers_used=trace.buffers_used,
        drawing=frozenset(drawing.intersection(drawing_candidates(modules.root))),
        mixes_draws=mixes_draws,
        calls_compiled=any(event.compiled for event in trace.events if builder.is_between(event)),
    )


def _refuse(trace: Trace) -> None:
    if trace.backward_locations:
        refuse_backward(trace.backward_locations[0])
    if trace.collective_locations:
        raise SplitError(
            f"The step calls a collective of its own at {trace.collective_locations[0]} (`self.all_gather`, "
            "`torch.distributed`). The ranks of a pipeline are at different places of the step, and would not meet "
            "there."
        )
    if trace.hooked_locations:
        raise SplitError(
            f"The step registers a hook on a parameter at {trace.hooked_locations[0]}: in a pipeline this would happen "
            "for each micro-batch, on some stages alone. Register it in `__init__` or in `on_fit_start`."
        )
    if trace.rebound_buffers:
        raise SplitError(
            f"The step replaces buffer {trace.rebound_buffers[0]!r} by another tensor (`self.buffer = ...`), which one "
            "stage alone would have. Change it in place (`self.buffer.copy_(...)`), or in a hook."
        )


def refuse_backward(place: str) -> None:
    """Raise ``SplitError``: a backward pass inside a step, at ``place`` (``file:line``), cannot be divided."""
    raise SplitError(
        f"The step runs a backward pass of its own at {place} (`torch.autograd.grad` or `backward`). A pipeline's "
        "backward passes through several processes, so it cannot be started inside the step. Use strategy='smddp'."
    )


def _refuse_scripted(modules: Modules) -> None:
    """Parameters of a scripted module are its own copies: another rank's cannot be taken out of it."""
    for name, module in modules.by_name.items():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        has_parameters = next(module.parameters(), None) is not None
        if has_parameters:
            raise SplitError(
                f"Module {name!r} is scripted (`torch.jit.script`), so its parameters cannot be placed on one rank of "
                "a pipeline. Train the module that it was made of, and script it afterwards, or use strategy='smddp'."
            )


def _unique(*sequences: Iterable[T]) -> tuple[T, ...]:
    """The members of all ``sequences``, each once, in the order of their first appearance."""
    return tuple(dict.fromkeys(chain.from_iterable(sequences)))


def _seeded_calls(trace: Trace) -> tuple[set[int], bool]:
    """The calls of modules that are seeded, as in :mod:`lightning_smddp.seeding`; and whether that is not enough.

    It is not where two draws follow each other without a module between, the first of which not all stages do.
    """
    seeded: set[int] = set()
    mixes = False
    calls: dict[int, list[Call]] = defaultdict(list)
    for call in trace.calls:
        calls[call.first].append(call)
    draws_inside = _calls_that_draw(trace)
    stack: list[tuple[Call, bool]] = []  # each with whether its caller has drawn since the last seed
    is_dirty = has_bound_draw = False
    for index in range(len(trace.events) + 1):
        while stack and stack[-1][0].last <= index and not (stack[-1][0].first == index and calls[index]):
            call, was_dirty = stack.pop()
            if was_dirty or call.index in draws_inside:
                seeded.add(call.index)
                is_dirty = has_bound_draw = False
        for call in calls[index]:
            if call.last <= call.first:  # without events: it draws nothing
                if is_dirty:
                    seeded.add(call.index)
                    is_dirty = has_bound_draw = False
                continue
            stack.append((call, is_dirty))
            is_dirty = has_bound_draw = False
        if index < len(trace.events) and trace.events[index].random:
            event = trace.events[index]
            mixes = mixes or has_bound_draw
            is_dirty = True
            has_bound_draw = has_bound_draw or not event.free
    return seeded, mixes


def _calls_that_draw(trace: Trace) -> set[int]:
    found: set[int] = set()
    begun = [call.index for call in trace.calls if call.draws_in_python]
    begun += [event.call for event in trace.events if event.random and event.call is not None]
    for index in begun:
        call: int | None = index
        while call is not None and call not in found:
            found.add(call)
            call = trace.calls[call].parent
    return found


class _Builder:
    def __init__(self, trace: Trace, modules: Modules, is_small: IsSmall) -> None:
        self.trace = trace
        self.modules = modules
        self.is_small = is_small
        self.nodes: list[Node] = []
        self.children: dict[int | None, list[Call]] = defaultdict(list)
        for call in trace.calls:
            self.children[call.parent].append(call)
        self.node_of: dict[int, int] = {}  # event -> node
        self.made: dict[int, list[int]] = defaultdict(list)  # event -> values
        for value in trace.values:
            self.made[value.event].append(value.index)
        # A tied parameter is found under several names, and known by the first one.
        self.canonical = {id(p): name for name, p in modules.root.named_parameters()}

    def visit(self, call: Call | None) -> None:
        """Emit the nodes of one call (None: the whole step) in order."""
        index, position, last = None, 0, len(self.trace.events)
        if call is not None:
            index, position, last = call.index, call.first, call.last
        # A call's events are [first, last), its children's lie within, one behind the other: what is between them was
        # done by the module's own code. A call without events depends on the batch alone, and is no node.
        for child in self.children[index]:
            self._operations(position, child.first)
            if child.last > child.first and self._is_unit(child.module):
                self._unit(child)
            else:
                self.visit(child)
            position = child.last
        self._operations(position, last)

    def _is_unit(self, name: str) -> bool:
        obstacle = self.modules.obstacles.get(name)
        whole = self.modules.must_be_whole.get(name)
        if whole and obstacle:
            raise SplitError(
                f"Module {name!r} cannot be placed on one stage, as {obstacle}, and cannot be opened, as {whole}. "
                "Let the module return all tensors that are used outside of it."
            )
        # A module that must be whole is a unit; any other is one if it is small, else it is opened.
        if obstacle is not None:
            return False
        return whole is not None or self.is_small(name)

    def backward_hooks(self) -> list[Colocation]:
        """The hooks at a module's inputs and outputs belong together."""
        events = self.trace.events
        colocations = []
        for call in self.trace.calls:
            if not call.has_backward_hooks or call.first not in self.node_of:
                continue
            # Around a module with such hooks torch calls an autograd function of its own: on the inputs just before the
            # module's first event, and on the outputs behind its last one.
            bounds = []
            if call.first > 0 and events[call.first - 1].name == BACKWARD_HOOK:
                bounds.append(call.first - 1)
            end = call.last - 1
            for event in events[call.last :]:
                if event.name == BACKWARD_HOOK and event.call == call.parent:
                    end = event.index
                    break
            bounds.append(end)
            if all(index in self.node_of for index in bounds):
                first, last = self.node_of[bounds[0]], self.node_of[end]
                reason = f"module {call.module!r} has full backward hooks, so it must be on one stage"
                colocations.append(Colocation(first, last, reason))
        return colocations

    def _operations(self, first: int, last: int) -> None:
        """A node for each event between calls of units."""
        for event in self.trace.events[first:last]:
            _refuse_event(event)
            changed = [rebind.new for rebind in event.mutated]
            outputs = _unique(event.returned.values, changed)
            self._add(
                None,
                [event],
                event.returned,
                outputs,
                event.mutated,
                event.parameters,
                event.seconds,
            )

    def _unit(self, call: Call) -> None:
        """One node for all events of a call."""
        assert call.returned is not None
        events = self.trace.events[call.first : call.last]
        for event in events:
            is_within = call.index in self.modules.chains[event.call]
            if event.function is HIDDEN and not is_within:
                _refuse_event(event)  # seen here first, but it was done outside
        # Seen from outside, a unit makes what it returns, and new values of what it changes in place. All else that is
        # made in it stays there.
        rebinds = self.modules.changes(call)
        changed = [rebind.new for rebind in rebinds]
        returned = [value for value in call.returned.values if self.modules.made_in(value, call.index)]
        module = self.modules.by_name[call.module]
        held = [self.canonical[id(parameter)] for parameter in module.parameters()]
        used = [event.parameters for event in events]
        self._add(
            call,
            events,
            call.returned,
            _unique(returned, changed),
            rebinds,
            _unique(held, *used),
            call.seconds,
        )

    def is_between(self, event: Event) -> bool:
        """Whether it is an operation between units."""
        return event.index in self.node_of and self.nodes[self.node_of[event.index]].module is None

    def _draws_in_python(self, call: Call) -> bool:
        if call.draws_in_python:
            return True
        return any(map(self._draws_in_python, self.children[call.index]))

    def _add(
        self,
        call: Call | None,
        events: list[Event],
        returned: Template,
        outputs: tuple[int, ...],
        rebinds: tuple[Rebind, ...],
        parameters: tuple[str, ...],
        seconds: float,
    ) -> None:
        """Append a node for ``events``: those of the unit's ``call``, or the one of an operation between units."""
        # Values that are made and used within the node are none of its inputs.
        values = self.trace.values
        own: set[int] = set()
        used: dict[int, None] = {}
        for event in events:
            self.node_of[event.index] = len(self.nodes)
            own.update(self.made[event.index])
            used.update(dict.fromkeys(event.inputs))
        first = events[0]
        last = events[-1]
        node = Node(
            index=len(self.nodes),
            inputs=tuple(value for value in used if value not in own),
            outputs=outputs,
            rebinds=rebinds,
            parameters=parameters,
            buffers=_unique(*(event.buffers for event in events)),
            buffers_read=_unique(*(event.buffers_read for event in events)),
            returned=returned,
            random=any(event.random for event in events),
            varies=any(value in self.modules.varying for value in outputs),
            location=first.location,
            seconds=seconds,
            activation_bytes=sum(values[value].nbytes for value in own),
            region=first.region if first.region == last.region else None,
        )
        if call is not None:
            node.module = call.module
            node.name = call.module
            node.checkpointed = call.checkpointed
            node.draws_in_python = self._draws_in_python(call)
            node.entry = call.entry
            node.call = call.index
        else:
            node.function = first.function
            node.name = f"{first.name} at {_short(first.location)}"
            node.checkpointed = first.checkpointed
            node.reads = first.reads
            node.free = first.free
            node.recomputable = self._is_recomputable(node)
        self.nodes.append(node)

    def _is_recomputable(self, node: Node) -> bool:
        """Whether an operation between units gives the same wherever and how often it is done, and writes nothing."""
        touches_state = node.parameters or node.rebinds or node.buffers or node.buffers_read
        if touches_state or node.random or node.free or node.reads:
            return False
        if any(self.trace.values[value].watched for value in node.outputs):
            return False  # the user's hook on its gradient would fire on two stages
        return not is_autograd_function(node.function)


def _refuse_event(event: Event) -> None:
    if event.function is HIDDEN:
        raise SplitError(
            f"At {event.location}, outside of any module that could be placed whole, the step cannot be followed: "
            f"{event.reason}. Put the code around it into a module of its own."
        )
    if event.parameters_changed:
        raise SplitError(
            f"At {event.location} the step changes parameter {event.parameters_changed[0]!r} in place, outside of any "
            "module that could be placed whole. Each stage has parameters of its own only. Do it in a hook outside of "
            "the step (`on_train_batch_end`), or in a module that holds the parameters."
        )


def _short(location: str) -> str:
    _, _, file_and_line = location.rpartition("/")
    return file_and_line
