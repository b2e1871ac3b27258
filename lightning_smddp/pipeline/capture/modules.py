"""What a trace says about each module: may it be placed whole, may it be opened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from torch import nn

from lightning_smddp.pipeline.capture.records import HIDDEN, Call, Deciding, Event, Rebind, Trace, varying

# Their statistics are of micro-batches, which is said elsewhere.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def changes_of_state(trace: Trace, modules: Modules) -> tuple[str, ...]:
    """What a step changes that later steps see, but for BatchNorm's statistics: each change and where it is."""
    found: dict[str, None] = {}
    for event in trace.events:
        calls = modules.chains[event.call]
        if any(isinstance(modules.by_name[trace.calls[call].module], _BATCH_NORMS) for call in calls):
            continue
        for kind, names in (("parameter", event.parameters_changed), ("buffer", event.buffers)):
            found.update({f"{kind} {name!r} at {event.location}": None for name in names})
    return tuple(found)


class Modules:
    """What the trace says about each module: may it be a unit, may it be opened."""

    def __init__(self, trace: Trace, root: nn.Module) -> None:
        self.trace, self.root = trace, root
        self.by_name = dict(root.named_modules())
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.chains: dict[int | None, tuple[int, ...]] = {None: ()}
        for call in trace.calls:
            self.calls[call.module].append(call)
            self.chains[call.index] = (*self.chains[call.parent], call.index)
        self.obstacles: dict[str, str] = {}  # module -> why it cannot be a unit
        self.must_be_whole: dict[str, str] = {}  # module -> why it cannot be opened
        self.varying = varying(trace, root, Deciding.MODULE)
        self._find_escapes()
        self._judge_calls()
        self._judge_events()

    def seconds(self, name: str) -> float:
        """Forward time of all calls of a module."""
        return sum(call.seconds for call in self.calls[name])

    def _judge_calls(self) -> None:
        for call in self.trace.calls:
            if call.obstacle is not None:
                self.obstacles.setdefault(call.module, call.obstacle)
        for name, calls in self.calls.items():
            if not all(call.last > call.first and call.returned is not None for call in calls):
                self.obstacles.setdefault(name, "its result depends on the batch alone")
        deciding = {call.module for call in self.trace.calls if call.sizes_by_batch}
        for name in deciding & self._returning(varying(self.trace, self.root, Deciding.BATCH)):
            self.obstacles.setdefault(name, "the size of its result depends on the batch's values")

    def _judge_events(self) -> None:
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
            elif event.decides:
                self._seal_around(event, "reads a tensor's value", "what it does next may depend on it")
            elif event.decided_by is Deciding.MODULE:
                self._seal_around(event, "makes a tensor", "its size depends on values that a module made", leaking)

    def _returning(self, values: frozenset[int]) -> set[str]:
        """The modules that return some of ``values``, made in them."""
        return {
            call.module
            for call in self.trace.calls
            if call.returned is not None
            and any(value in values and self.made_in(value, call.index) for value in call.returned.values)
        }

    def _seal_around(self, event: Event, does: str, why: str, unfit: Collection[str] = ()) -> None:
        """The innermost module that can be placed whole, and is not ``unfit``, stays whole."""
        inner_first = [self.trace.calls[index].module for index in reversed(self.chains[event.call])]
        for name in inner_first:
            if name and name not in self.obstacles and name not in unfit:
                self.must_be_whole.setdefault(name, f"it {does} in {event.location}, and {why}")
                return

    def _find_escapes(self) -> None:
        """Values used outside of the call that made them, without being returned by it."""
        handed_over: dict[int, set[int]] = {}
        for call in self.trace.calls:
            handed_over[call.index] = {rebind.new for rebind in self.changes(call)}
            if call.returned is not None:
                handed_over[call.index].update(call.returned.values)
        for event in self.trace.events:
            around = set(self.chains[event.call])
            for value in event.inputs:
                for call_index in self._calls_around_maker(value):
                    if call_index not in around and value not in handed_over[call_index]:
                        name = self.trace.calls[call_index].module
                        where = f"{event.location} without being returned"
                        self.obstacles.setdefault(name, f"a tensor made in it is used at {where}")

    def changes(self, call: Call) -> tuple[Rebind, ...]:
        """Tensors made outside of ``call`` that it changes in place: what they were before it, and are after it."""
        before: dict[int, tuple[int, int | None]] = {}  # what a tensor is now -> (what it was before, position)
        for event in self.trace.events[call.first : call.last]:
            for old, new, position in event.mutated:
                if old is None:
                    continue
                if old in before:
                    before[new] = before.pop(old)
                elif not self.made_in(old, call.index):
                    before[new] = (old, position)
        return tuple(Rebind(old, new, position) for new, (old, position) in before.items())

    def made_in(self, value: int, call: int) -> bool:
        """Whether an operation within ``call`` made ``value``."""
        return call in self._calls_around_maker(value)

    def _calls_around_maker(self, value: int) -> tuple[int, ...]:
        """The calls within which ``value`` was made, from the outside in."""
        event = self.trace.values[value].event
        return self.chains[self.trace.events[event].call]
