"""Which tensor of a running step is which value of its trace; who made the storage that it lies in, and of what."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_smddp._compat.torch import storage_key
from lightning_smddp.pipeline.capture.ops import user_location
from lightning_smddp.pipeline.capture.records import HIDDEN, Call, Event, Rebind, Template, Trace, Value
from lightning_smddp.wire.pytree import leaves, map_leaves

EXTENSION = "it calls operations that torch's function modes do not see (an extension's, say)"
ALIAS = "it uses a tensor whose memory was changed through another view of it"

_EMPTY = torch.empty(0)
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type)


@dataclass
class Memory:
    """One storage.

    Attributes:
        number: counts storages.
        call: the module call in which it was first seen (None: before or outside of all).
        bound: what is in it depends on a parameter or a random number.
        changed: a bound operation changed it in place.
        known: it came out of an operation that a function mode saw.
        hidden: the event of the hidden operation that made it.
        parameter, buffer: first name of the parameter or buffer that lies in it.
        batch_sizes: sizes of free tensors in it that depend on the batch's values.
    """

    number: int
    call: int | None
    key: StorageWeakRef | None
    bound: bool = False
    changed: bool = False
    known: bool = False
    hidden: int | None = None
    parameter: str | None = None
    buffer: str | None = None
    batch_sizes: frozenset[int] = frozenset()
    views: list[weakref.ref[Tensor]] = field(default_factory=list)


class Memories:
    """The storages of a step; looked up by tensor."""

    def __init__(self, module: nn.Module) -> None:
        self._by_storage: dict[StorageWeakRef, Memory] = {}
        self._count = 0
        for name, parameter in module.named_parameters():
            memory = self.of(parameter, None)
            memory.bound = True
            memory.parameter = memory.parameter or name
        for name, buffer in module.named_buffers():
            memory = self.of(buffer, None)
            memory.buffer = memory.buffer or name

    def of(self, tensor: Tensor, call: int | None) -> Memory:
        """The storage of ``tensor``, seen first in ``call`` if it is new."""
        key = storage_key(tensor)
        if key is not None and key in self._by_storage:
            return self._by_storage[key]
        memory = Memory(self._count, call, key)
        self._count += 1
        if key is not None:
            self._by_storage[key] = memory  # the key keeps the storage's address from being used again
        return memory

    @staticmethod
    def live_views(memory: Memory) -> Iterator[Tensor]:
        """The tracked tensors in ``memory`` that still exist."""
        for reference in memory.views:
            view = reference()
            if view is not None:
                yield view


class Tracking:
    """The values of a trace in the making. ``stack`` are the module calls that the step is in."""

    def __init__(self, module: nn.Module, known: Trace) -> None:
        self.trace = Trace(
            changed_buffers=known.changed_buffers,
        )
        # By identity of the tensor; the module keeps these tensors, so no other one can have it.
        self.parameters = {id(p): name for name, p in module.named_parameters()}
        self.buffers = {id(b): name for name, b in module.named_buffers()}
        self.modules = dict(module.named_modules())
        self.memories = Memories(module)
        # By identity, too, but nothing keeps these tensors alive: the reference says whether it is still the same one.
        self.tracked: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.stack: list[Call] = []

    def hide(self, call: int | None, reason: str) -> Event:
        """Record an operation in ``call`` that was not seen."""
        event = Event(
            index=len(self.trace.events),
            function=HIDDEN,
            inputs=(),
            parameters=(),
            call=call,
            location=user_location(),
            returned=Template(None, ()),
            reason=reason,
        )
        self.trace.events.append(event)
        return event

    def memory_of(self, tensor: Tensor) -> Memory:
        """The storage of ``tensor``."""
        return self.memories.of(tensor, self.innermost_call())

    def innermost_call(self) -> int | None:
        """The index of the module call that the step is in; None outside of all."""
        if not self.stack:
            return None
        return self.stack[-1].index

    def rebind(self, mutated: list[Tensor], arguments: list[Any], event: int) -> Iterator[Rebind]:
        """New values for tensors changed in place, and for every other view of their memory."""
        positions = {id(leaf): position for position, leaf in enumerate(arguments)}
        views = {id(tensor): tensor for tensor in mutated}
        for tensor in mutated:
            memory = self.memory_of(tensor)
            memory.changed = True
            # A change in place changes every view of the memory. Which those are only this process can see: stages that
            # hold stand-ins follow what is written down here.
            for view in self.memories.live_views(memory):
                views[id(view)] = view
        for key, view in views.items():
            if key in self.parameters or key in self.buffers:
                continue  # these stay on their stage
            old = self.find_tracked(view)
            new = self.track(view, event)
            yield Rebind(old, new, positions.get(key))

    def track(self, tensor: Tensor, event: int, binds: bool = True) -> int:
        """From here on ``tensor`` is a new value, made by ``event``, which ``binds`` its memory if it wrote there."""
        # Sparse tensors have a shape and no strides; a nested one's shape is another in each row, so it has neither.
        memory = self.memory_of(tensor)
        shape: tuple[int, ...] = ()
        stride: tuple[int, ...] = ()
        is_strided = tensor.layout == torch.strided and not tensor.is_nested
        if not tensor.is_nested:
            shape = tuple(tensor.shape)
        if is_strided:
            stride = tuple(tensor.stride())
        value = Value(
            index=len(self.trace.values),
            event=event,
            shape=shape,
            stride=stride,
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            memory=memory.number,
            sendable=is_strided,
        )
        self.trace.values.append(value)
        reference = weakref.ref(tensor)
        if self.find_tracked(tensor) is None:
            memory.views.append(reference)
        memory.bound = memory.bound or binds
        self.tracked[id(tensor)] = (reference, value.index)
        return value.index

    def find_tracked(self, tensor: Tensor) -> int | None:
        """The value that ``tensor`` is known to be."""
        reference, value = self.tracked.get(id(tensor), (None, None))
        if reference is None or reference() is not tensor:  # gone: its identity is another tensor's now
            return None
        return value

    def find(self, tensor: Tensor) -> int | None:
        """The value that ``tensor`` is; None for parameters and free tensors."""
        value = self.find_tracked(tensor)
        if value is not None or id(tensor) in self.parameters or id(tensor) in self.buffers:
            return value
        # Not seen to be made: is what lies in its memory bound all the same? A view of a parameter, what an extension
        # made of one, or an alias of something that was changed in place comes here.
        memory = self.memory_of(tensor)
        if not memory.bound and (memory.known or tensor.grad_fn is None):
            return None
        if memory.hidden is not None:
            return self.track(tensor, memory.hidden)
        reason = EXTENSION
        if memory.changed:
            reason = ALIAS
        hidden = self.hide(memory.call, reason)
        return self.track(tensor, hidden.index)

    def template(self, result: Any, arguments: list[Any]) -> Template:
        """Where each leaf of ``result`` comes from."""
        # Plain leaves are left out: small integers and None are one object wherever they are, which says nothing.
        positions = {id(leaf): position for position, leaf in enumerate(arguments) if not is_plain(leaf)}
        sources: list[tuple[str, Any]] = []
        for leaf in leaves(result):
            value = None
            if isinstance(leaf, Tensor):
                value = self.find_tracked(leaf)
            if id(leaf) in positions:
                sources.append(("argument", positions[id(leaf)]))
            elif value is not None:
                # What an `autograd.Function` returns requires a gradient only after the last operation of its forward.
                self.trace.values[value].requires_grad = leaf.requires_grad
                sources.append(("value", value))
            else:
                sources.append(("constant", _plain_or_none(leaf)))
        if isinstance(result, Tensor):
            return Template(..., tuple(sources))
        skeleton = map_leaves(_blank, result)
        return Template(skeleton, tuple(sources))


def _blank(leaf: Any) -> Any:
    """What stands in a skeleton for a leaf; of the right kind, as some containers check."""
    if isinstance(leaf, Tensor):
        return _EMPTY
    return _plain_or_none(leaf)


def _plain_or_none(leaf: Any) -> Any:
    if is_plain(leaf):
        return leaf
    return None


def is_plain(leaf: Any) -> bool:
    """Whether a leaf may be repeated on another stage as it is."""
    return leaf is None or isinstance(leaf, _PLAIN)
