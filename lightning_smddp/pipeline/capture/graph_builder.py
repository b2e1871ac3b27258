"""From a trace to a graph: which modules are units, and what of the trace is in which node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeAlias, TypeVar

import torch

from lightning_smddp._compat.torch import BACKWARD_HOOK
from lightning_smddp.pipeline.capture.graph import Colocation, Node, SplitError, StepGraph, refuse_backward
from lightning_smddp.pipeline.capture.ops import is_autograd_function
from lightning_smddp.pipeline.capture.records import (
    HIDDEN,
    Call,
    Event,
    Modules,
    Rebind,
    Template,
    Trace,
    changes_of_state,
)
from lightning_smddp.pipeline.runtime.casts import cast_type
from lightning_smddp.seeding import drawing_candidates

T = TypeVar("T")

IsSmall: TypeAlias = Callable[[str], bool]
"""Whether a module of this name may be a unit, if nothing else is against it."""


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
        calls_apply=any(node.region is not None or is_autograd_function(node.function) for node in builder.nodes),
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


def _refuse_scripted(modules: Modules) -> None:
    """Parameters of a scripted module are its own copies: another rank's cannot be taken out of it."""
    for name, module in modules.by_name.items():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        has_parameters = next(module.parameters(), None) is not None
        if has_parameters:
            raise SplitError(
                f"Module {name!r} is scripted (`torch.jit.script`), so its parameters cannot be placed on one rank of "
                "a pipeline. Train the module that it was made of, and script it afterwards."
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
        if index < len(trace.events) and trace.events[index].is_seeded:
            event = trace.events[index]
            mixes = mixes or has_bound_draw
            is_dirty = True
            has_bound_draw = has_bound_draw or not event.free
    return seeded, mixes


def _calls_that_draw(trace: Trace) -> set[int]:
    found: set[int] = set()
    begun = [call.index for call in trace.calls if call.draws_in_python]
    begun += [event.call for event in trace.events if event.is_seeded and event.call is not None]
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
