"""Which tensor of a running step is which value of its trace."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.capture.patches import user_location
from lightning_smddp.pipeline.capture.records import HIDDEN, Call, Event, Rebind, Template, Trace, Value
from lightning_smddp.pipeline.capture.storages import Memories, Memory
from lightning_smddp.wire.pytree import leaves, map_leaves

EXTENSION = "it calls operations that torch's function modes do not see (an extension's, say)"
_ALIAS = "it uses a tensor whose memory was changed through another view of it"


class Tracking:
    """The values of a trace in the making. ``stack`` are the module calls that the step is in."""

    def __init__(self, module: nn.Module, known: Trace) -> None:
        self.trace = Trace(random_functions=known.random_functions, changed_buffers=known.changed_buffers)
        self.trace.reads_draws = known.reads_draws
        self.parameters = {id(p): name for name, p in module.named_parameters()}
        self.buffers = {id(b): name for name, b in module.named_buffers()}
        self.modules = dict(module.named_modules())
        self.memories = Memories(module)
        self.tracked: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.stack: list[Call] = []

    def hide(self, call: int | None, reason: str) -> Event:
        """Record an operation in ``call`` that was not seen."""
        event = Event(len(self.trace.events), HIDDEN, (), (), call, user_location(), Template(None, ()), reason=reason)
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
            views.update((id(view), view) for view in self.memories.live_views(memory))
        for view in views.values():
            if id(view) not in self.parameters and id(view) not in self.buffers:  # these stay on their stage
                old = self.find_tracked(view)
                yield Rebind(old, self.track(view, event), positions.get(id(view)))

    def track(self, tensor: Tensor, event: int) -> int:
        """From here on ``tensor`` is a new value, made by ``event``."""
        memory = self.memory_of(tensor)
        shape: tuple[int, ...] = ()
        stride: tuple[int, ...] = ()
        is_strided = tensor.layout == torch.strided and not tensor.is_nested
        if not tensor.is_nested:
            shape = tuple(tensor.shape)
        if is_strided:
            stride = tuple(tensor.stride())
        value = Value(
            len(self.trace.values),
            event,
            shape,
            stride,
            tensor.dtype,
            tensor.requires_grad,
            memory.number,
            sendable=is_strided,
        )
        self.trace.values.append(value)
        reference = weakref.ref(tensor)
        if self.find_tracked(tensor) is None:
            memory.views.append(reference)
        memory.bound = True
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
        memory = self.memory_of(tensor)
        if not memory.bound and (memory.known or tensor.grad_fn is None):
            return None
        if memory.hidden is not None:
            return self.track(tensor, memory.hidden)
        reason = EXTENSION
        if memory.changed:
            reason = _ALIAS
        return self.track(tensor, self.hide(memory.call, reason).index)

    def template(self, result: Any, arguments: list[Any]) -> Template:
        """Where each leaf of ``result`` comes from."""
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
        return Template(map_leaves(_blank, result), tuple(sources))


_EMPTY = torch.empty(0)


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
    plain = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type)
    return leaf is None or isinstance(leaf, plain)
