"""What a trace says about each module: may it be placed whole, may it be opened."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from lightning_smddp.pipeline.records import HIDDEN, Call, Event, Rebind, Trace

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
            found.update({f"{kind} {name!r} at {event.place}": None for name in names})
    return tuple(found)


_SIZES_BY_VALUES = {"argwhere", "masked_select", "nonzero", "unique", "unique_consecutive"}


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
        self.seals: dict[str, str] = {}  # module -> why it cannot be opened
        self.refusal: str | None = None  # why the step cannot be cut, wherever that would be
        self._find_escapes()
        self._judge_calls()

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
        for event in self.trace.events:
            if event.call is None:
                if self._sizes_by_values(event):
                    self._refuse_sizes(event)
                continue
            name = self.trace.calls[event.call].module
            if event.function is HIDDEN:
                self.seals[name] = event.reason
            elif event.parameters_changed:
                self.seals[name] = f"it changes parameter {event.parameters_changed[0]!r} in place"
            elif event.decides and any(call.first > event.index for call in self.trace.calls):
                self._seal_around(event, "reads a tensor's value", "what it does next may depend on it")
            elif self._sizes_by_values(event):
                self._seal_around(event, "makes a tensor", "its size depends on values that a module made")

    def _sizes_by_values(self, event: Event) -> bool:
        """Whether the size of what ``event`` makes depends on values of bound inputs: other stages count on it."""
        if not event.inputs:
            return False
        if event.name == "where":
            return event.returned.skeleton is not ...
        if event.name != "__getitem__":
            return event.name in _SIZES_BY_VALUES
        kinds = [self.trace.values[value].dtype for value in event.returned.values]
        masks = [value for value in event.inputs if self.trace.values[value].dtype is torch.bool]
        return bool(masks) and torch.bool not in kinds

    def _refuse_sizes(self, event: Event) -> None:
        """Between modules only the stage that has the values knows such a size, and later stages count on it."""
        if any(call.first > event.index for call in self.trace.calls):
            self.refusal = (
                f"{event.name} at {event.place} makes a tensor whose size depends on values that a module made, and "
                "the step calls modules behind it, on stages that count on sizes. Pad it, do it behind the last "
                "module, or put it and what follows into one module."
            )

    def _seal_around(self, event: Event, does: str, why: str) -> None:
        """The innermost module that can be placed whole stays whole."""
        inner_first = [self.trace.calls[index].module for index in reversed(self.chains[event.call])]
        name = next((name for name in inner_first if name and name not in self.obstacles), None)
        if name is not None:
            self.seals.setdefault(name, f"it {does} in {event.place}, and {why}")

    def _find_escapes(self) -> None:
        """Values used outside of the call that made them, without being returned by it."""
        handed_over: dict[int, set[int]] = {}
        for call in self.trace.calls:
            handed_over[call.index] = set(call.returned.values) if call.returned else set()
            handed_over[call.index].update(rebind.new for rebind in self.changes(call))
        for event in self.trace.events:
            outside = set(self.chains[event.call])
            for value in event.inputs:
                for call_index in self.chains[self.trace.events[self.trace.values[value].event].call]:
                    if call_index not in outside and value not in handed_over[call_index]:
                        name = self.trace.calls[call_index].module
                        where = f"{event.place} without being returned"
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
        return call in self.chains[self.trace.events[self.trace.values[value].event].call]
