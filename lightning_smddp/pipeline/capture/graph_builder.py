"""From a trace to a graph: which modules are units, and what of the trace is in which node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields

import torch
from torch import nn

from lightning_smddp.pipeline.capture.graph import Colocation, Node, SplitError, StepGraph
from lightning_smddp.pipeline.capture.ops import draws_by_value, is_autograd_function
from lightning_smddp.pipeline.capture.records import (
    OPAQUE,
    Call,
    Calls,
    Changes,
    Event,
    InPlaceVersion,
    StepFacts,
    Trace,
    Values,
    each_once,
)

_BACKWARD_HOOK = "BackwardHookFunction.apply"  # what full backward hooks do to a module's inputs and outputs
_HOOKED = "full backward hooks take hold of its inputs and outputs, which have to be on one stage"
_DRAWS_BY_VALUE = "how many random numbers it draws depends on values of one stage, and all stages draw others then"
_UNSEEN = (
    "it calls operations that torch's function modes do not see (an extension's, say), or uses a tensor whose memory "
    "was changed through another view of it"
)


def build_graph(trace: Trace, modules: Modules, small: Iterable[str]) -> StepGraph:
    """Choose the units (outermost modules that may be one and are among the ``small`` ones) and list the nodes.

    Raises:
        SplitError: a module can neither be a unit nor be opened, or the step does what no split can follow.
    """
    # What no cut can make right is refused first, whatever the units are.
    if trace.refusals:
        raise SplitError(trace.refusals[0])
    _refuse_scripted(modules)
    builder = _Builder(trace, modules, small)
    builder.visit((), 0, len(trace.events))
    nodes = builder.nodes
    between = [event for event in trace.events if nodes[builder.node_of[event.index]].module is None]
    facts = {fact.name: getattr(trace, fact.name) for fact in fields(StepFacts)}
    return StepGraph(
        **facts,
        nodes=nodes,
        units=each_once(node.module for node in nodes),
        colocations=list(builder.gradient_hooks()),
        cast_type=cast_type(trace),
        drawing=frozenset(trace.drawing),
        repeats_draws=any(event.behind_draws for event in between),
        calls_compiled=any(event.compiled for event in between),
        calls_apply=any(node.region is not None or is_autograd_function(node.function) for node in nodes),
    )


def cast_type(trace: Trace) -> torch.dtype | None:
    """The type that a step casts weights to, each once; None where it does otherwise, so that no copy may be kept.

    Gradients of several uses would be summed in the copy's 16 bits. In a checkpoint nothing is kept anyway, and its
    backward may forget all casts, in a thread of its own.
    """
    kinds = {kind for _, kind in trace.casts}
    if len(kinds) != 1 or max(trace.casts.values()) > 1:
        return None
    if any(event.region is not None for event in trace.events):
        return None
    return kinds.pop()


def _refuse_scripted(modules: Modules) -> None:
    """Parameters of a scripted module are its own copies: another rank's cannot be taken out of it."""
    for name, module in modules.by_name.items():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise SplitError(
                f"Module {name!r} is scripted (`torch.jit.script`), so its parameters cannot be placed on one rank of "
                "a pipeline. Train the module that it was made of, and script it afterwards."
            )


def _not_opened(event: Event) -> str | None:
    """Why the module that does this cannot be opened; None if it can."""
    if event.function is OPAQUE:
        return _UNSEEN
    if any(map(draws_by_value, event.behind_draws)):
        return _DRAWS_BY_VALUE
    return _HOOKED if event.name == _BACKWARD_HOOK else None


def _refuse_between_modules(event: Event) -> None:
    reason = _not_opened(event)
    if reason is not None:
        raise SplitError(
            f"At {event.location}, outside of any module that could be placed whole, the step cannot be followed: "
            f"{reason}. Put the code around it into a module of its own."
        )


class Modules:
    """What the trace says about each module: may it be a unit, may it be opened.

    Attributes:
        calls: by module.
        not_placeable: module -> why it cannot be a unit.
        must_be_whole: module -> why it cannot be opened.
    """

    def __init__(self, trace: Trace, root: nn.Module) -> None:
        self.trace = trace
        self.root = root
        self.by_name = dict(root.named_modules())
        self.calls: dict[str, list[Call]] = defaultdict(list)
        for call in trace.calls:
            self.calls[call.module].append(call)
        self.not_placeable: dict[str, str] = {}
        self.must_be_whole: dict[str, str] = {}
        # In this order: the last one takes modules that may be units, so all that may not have to be known.
        self._find_escapes()
        for call in trace.calls:
            if call.not_placeable is not None:
                self.not_placeable.setdefault(call.module, call.not_placeable)
        self._judge_events()

    def seconds(self, name: str) -> float:
        """Forward time of all calls of a module."""
        return sum(call.seconds for call in self.calls[name])

    def _judge_events(self) -> None:
        """Modules that do what cannot be followed from outside are not opened."""
        values, calls = self.trace.values, self.trace.calls
        # A module that returns such a tensor is no help: whoever calls it does not know the size either.
        leaking = {call.module for call in calls if any(values[value].varies for value in self.results(call))}
        last_begin = max((call.first for call in calls), default=0)
        for event in self.trace.events:
            if not event.calls:
                continue
            reason = _not_opened(event)
            if reason is not None:
                self.must_be_whole[event.calls[-1].module] = reason
            elif event.sized_by_module and event.index < last_begin:  # what comes behind it is the last stage's alone
                # The innermost module around it that can be placed whole is.
                around = [call.module for call in reversed(event.calls)]
                fit = [name for name in around if name not in self.not_placeable and name not in leaking]
                reason = f"it makes a tensor in {event.location}, and its size depends on values that a module made"
                self.must_be_whole.update(dict.fromkeys(fit[:1], reason))

    def _find_escapes(self) -> None:
        """Values used outside of the call that made them, without being returned by it."""
        # Hooks that collect tensors, and attributes that later code reads, hand values over in other ways. A stage that
        # does not run the module would not have them: such a module is no unit, and is opened until somebody returns
        # the tensor.
        handed_over = {}  # of each call: what its caller gets, as a result or by a change in place
        for call in self.trace.calls:
            handed_over[call] = {*call.returned.values, *(version.new for version in self.changes(call))}
        for event in self.trace.events:
            for value in event.inputs:
                for call in self._calls_around(value):
                    if call not in event.calls and value not in handed_over[call]:
                        reason = f"a tensor made in it is used at {event.location} without being returned"
                        self.not_placeable.setdefault(call.module, reason)

    def changes(self, call: Call) -> Changes:
        """Tensors made outside of ``call`` that it changes in place: what they were before it, and are after it."""
        # A tensor that is changed twice, a -> b -> c, is one change from a to c: found by what it is now.
        before: dict[int, tuple[int, int | None]] = {}  # what a tensor is now -> (what it was before, position)
        for event in self.trace.events[call.first : call.last]:
            for old, new, position in event.mutated:
                if old in before:
                    before[new] = before.pop(old)
                elif old is not None and call not in self._calls_around(old):
                    before[new] = (old, position)
        return tuple(InPlaceVersion(old, new, position) for new, (old, position) in before.items())

    def results(self, call: Call) -> Values:
        """The values that ``call`` returns and has made."""
        return tuple(value for value in call.returned.values if call in self._calls_around(value))

    def _calls_around(self, value: int) -> Calls:
        """Those that it was made in."""
        return self.trace.events[self.trace.values[value].event].calls


class _Builder:
    def __init__(self, trace: Trace, modules: Modules, small: Iterable[str]) -> None:
        self.trace = trace
        self.modules = modules
        self.small = frozenset(small)
        self.nodes: list[Node] = []
        self.children: dict[Calls, list[Call]] = defaultdict(list)
        for call in trace.calls:
            self.children[call.calls].append(call)
        self.node_of: dict[int, int] = {}  # event -> node
        # A tied parameter is found under several names, and known by the first one.
        self.canonical = {id(p): name for name, p in modules.root.named_parameters()}

    def visit(self, calls: Calls, first: int, last: int) -> None:
        """Emit in order the nodes within ``calls`` (none: the whole step), whose events are ``[first, last)``."""
        # Its children's events lie within, one behind the other: what is between them was done by the module's own
        # code. A call without events depends on the batch alone, and is no node.
        for child in self.children[calls]:
            self._operations(first, child.first)
            if child.last > child.first and self._is_unit(child.module):
                self._unit(child)
            else:
                self.visit((*calls, child), child.first, child.last)
            first = child.last
        self._operations(first, last)

    def _is_unit(self, name: str) -> bool:
        """A module that must be whole is a unit; any other that may be one is one if it is small."""
        not_placeable = self.modules.not_placeable.get(name)
        whole = self.modules.must_be_whole.get(name)
        if whole and not_placeable:
            raise SplitError(
                f"Module {name!r} cannot be placed on one stage, as {not_placeable}, and cannot be opened, as {whole}. "
                "Let the module return all tensors that are used outside of it."
            )
        return whole is not None or (not_placeable is None and name in self.small)

    def gradient_hooks(self) -> Iterator[Colocation]:
        """A tensor's hook is registered by the stage that makes it: a later one's has a part of the gradient only."""
        for value, event, calls, location in self.trace.hooks:
            maker = self.node_of[self.trace.values[value].event]
            around = {call.module for call in calls}
            last = self.node_of.get(event, len(self.nodes))
            if last == len(self.nodes) or self.nodes[last].module not in around:
                last -= 1  # registered before that node, not within it
            reason = (
                f"at {location} a hook is registered on the gradient of a tensor that an earlier stage would have "
                "made: register it right behind what makes the tensor"
            )
            yield Colocation(maker, last, reason)

    def _operations(self, first: int, last: int) -> None:
        """A node for each event between calls of units."""
        for event in self.trace.events[first:last]:
            _refuse_between_modules(event)
            _, _, place = event.location.rpartition("/")
            node = self._node(f"{event.name} at {place}", [event], event, event.returned.values, event.mutated)
            node.function = event.function
            node.reads = event.reads
            node.free = event.free
            node.recomputable = self._is_recomputable(node)

    def _unit(self, call: Call) -> None:
        """One node for all events of a call."""
        modules = self.modules
        events = self.trace.events[call.first : call.last]
        for event in events:
            if call not in event.calls:
                _refuse_between_modules(event)  # seen here first, but it was done outside
        # Seen from outside, a unit makes what it returns, and new values of what it changes in place. All else that is
        # made in it stays there.
        node = self._node(call.module, events, call, modules.results(call), modules.changes(call))
        node.module = call.module
        held = modules.by_name[call.module].parameters()
        node.parameters = each_once((self.canonical[id(parameter)] for parameter in held), node.parameters)
        node.entry = call.entry
        node.is_seeded = call.is_seeded

    def _node(self, name: str, events: list[Event], source: Event | Call, results: Values, changes: Changes) -> Node:
        """Append a node for ``events``, which are ``source`` or lie within it."""
        # Values that are made and used within the node are none of its inputs.
        own = {value for event in events for value in event.made}
        self.node_of.update(dict.fromkeys((event.index for event in events), len(self.nodes)))
        values, first = self.trace.values, events[0]
        outputs = each_once(results, (version.new for version in changes))
        used = each_once(*(event.inputs for event in events))
        node = Node(
            index=len(self.nodes),
            name=name,
            inputs=tuple(value for value in used if value not in own),
            outputs=outputs,
            versions=changes,
            parameters=each_once(*(event.parameters for event in events)),
            buffers=each_once(*(event.buffers for event in events)),
            buffers_read=each_once(*(event.buffers_read for event in events)),
            returned=source.returned,
            random=any(event.random for event in events),
            location=first.location,
            seconds=source.seconds,
            activation_bytes=sum(values[value].nbytes for value in own),
            varies=any(values[value].varies for value in outputs),
            region=first.region if first.region == events[-1].region else None,
        )
        self.nodes.append(node)
        return node

    def _is_recomputable(self, node: Node) -> bool:
        """Whether an operation between units gives the same wherever and how often it is done, and writes nothing."""
        touches_state = node.parameters or node.versions or node.buffers or node.buffers_read
        if touches_state or node.random or node.free or node.reads:
            return False
        if any(hook.value in node.outputs for hook in self.trace.hooks):
            return False  # the user's hook on its gradient would fire on two stages
        return not is_autograd_function(node.function)
