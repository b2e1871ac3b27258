"""What is noted of an operation of a trace: what it changes, whose values decide its sizes, where buffers are used."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_smddp.pipeline.capture.ops import is_inplace, user_location
from lightning_smddp.pipeline.capture.records import Call, Deciding, Event, Trace, deciding_tensors, sizes_that_vary
from lightning_smddp.pipeline.capture.tracking import ALIAS, Tracking

T = TypeVar("T")


class Notes(Tracking):
    """The values of a trace, and what its operations do to them.

    Args:
        module: the root.
        known: what earlier runs of the step have found out.
        borrows: whether parameters are lent for each operation, which writes them.
    """

    def __init__(self, module: nn.Module, known: Trace, borrows: bool) -> None:
        super().__init__(module, known)
        self.known = known
        self.borrows = borrows

    def note_changes(self, event: Event, given: list[Tensor], mutated: list[Tensor]) -> None:
        """Which buffers and parameters it changes, and which of the buffers that the step changes it reads."""
        memories = [self.memory_of(tensor) for tensor in mutated]
        event.buffers = each_once(memory.buffer for memory in memories)
        changed = [memory.parameter for memory in memories]
        if not self.borrows or is_inplace(event.function):  # borrowing a parameter writes it, too
            changed += [self.parameters.get(id(tensor)) for tensor in mutated]  # by `p.data = ...`
        event.parameters_changed = each_once(changed)
        self.trace.changed_buffers |= set(event.buffers)
        read = each_once(self.buffers.get(id(tensor)) for tensor in given)
        event.buffers_read = tuple(name for name in read if name in self.known.changed_buffers)

    def note_sizes(self, event: Event, given: list[Tensor], arguments: list[Any]) -> None:
        """Whether the size of what ``event`` makes depends on values, and whose."""
        sizes: set[int] = set()
        for tensor in given:
            memory = self.memory_of(tensor)
            if not memory.bound:
                sizes |= memory.batch_sizes
        event.batch_sizes = frozenset(sizes)
        deciding = deciding_tensors(event.name, arguments)
        if not deciding:
            return
        if any(self.memory_of(tensor).bound for tensor in deciding):
            event.decided_by = Deciding.MODULE
            return
        event.decided_by = Deciding.BATCH
        self.trace.reads_of_batch.append(user_location())
        for call in self.stack:
            call.sizes_by_batch = True

    def note_buffers(self, given: list[Tensor]) -> None:
        """Which buffers are used by which module, or by the step itself."""
        user = ""  # the step itself
        if self.stack:
            user = self.stack[-1].module
        for tensor in given:
            name = self.buffers.get(id(tensor))
            if name is not None:
                self.trace.buffers_used.setdefault(name, set()).add(user)

    def note_free(self, event: Event, made: list[Tensor], mutated: list[Tensor], fixed: set[int]) -> None:
        """A free operation is done again by each stage, so its changes in place must not be hidden in a unit."""
        makes_size = event.decided_by is not None
        for tensor in made:
            memory = self.memory_of(tensor)
            memory.known = True
            memory.bound = memory.parameter is not None
            sizes = sizes_that_vary(tensor.shape, event.batch_sizes, fixed | {1}, makes_size)
            memory.batch_sizes |= sizes
        if event.reads:
            self.trace.reads_of_batch.append(user_location())
        for tensor in mutated:
            memory = self.memory_of(tensor)
            has_views = next(self.memories.live_views(memory), None) is not None
            if has_views:  # these may be on another stage, which would not see the change
                self.hide(self.innermost_call(), ALIAS)
            for call in self.stack:
                # What the call has made itself, or keeps for itself, nobody misses where the call is not run.
                if not self._within(memory.call, call.index) and not self._owns(call, tensor):
                    call.obstacle = f"it changes a tensor in place, at {user_location()}, that was made outside of it"

    def _within(self, call: int | None, outer: int) -> bool:
        """Whether ``call`` is ``outer``, or was made within it."""
        while call is not None and call != outer:
            call = self.trace.calls[call].parent
        return call == outer

    def _owns(self, call: Call, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an attribute of the called module or of one within."""
        modules = self.modules[call.module].modules()
        attributes = chain.from_iterable(vars(module).values() for module in modules)
        return any(value is tensor for value in attributes)

    def watch(self, tensor: Any) -> None:
        """The user's code puts a hook on ``tensor``."""
        if id(tensor) in self.parameters:
            self.trace.hooked_locations.append(user_location())
        if isinstance(tensor, Tensor):
            value = self.find(tensor)
            if value is not None:
                self.trace.values[value].watched = True


def each_once(found: Iterable[T | None]) -> tuple[T, ...]:
    """Those that are not None, each once, in order."""
    return tuple(dict.fromkeys(one for one in found if one is not None))
