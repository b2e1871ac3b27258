"""Which tensor of a running step is which value of its trace; who made the storage that it lies in, and of what."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from lightning_smddp._compat.torch import storage_key
from lightning_smddp.pipeline.capture.ops import is_inplace, user_location
from lightning_smddp.pipeline.capture.records import (
    OPAQUE,
    PUTS_ROWS_BACK,
    Call,
    Calls,
    Event,
    GradientHook,
    InPlaceVersion,
    Names,
    OutputSpec,
    TensorSpec,
    Trace,
    Value,
    Values,
    deciding_tensors,
    each_once,
)
from lightning_smddp.pytree import leaves, map_leaves

_EMPTY = torch.empty(0)
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type)


@dataclass
class Storage:
    """One storage.

    Attributes:
        number: counts storages.
        calls: the module calls in which it was first seen.
        bound: what is in it depends on a parameter or a random number.
        opaque: the event of the opaque operation that made it.
        parameter, buffer: first name of the parameter or buffer that lies in it.
        varying: sizes of tensors in it that depend on values that a module made.
        tensors: those in it that are values; some may be gone.
    """

    number: int
    calls: Calls
    bound: bool = False
    opaque: int | None = None
    parameter: str | None = None
    buffer: str | None = None
    varying: set[int] = field(default_factory=set)
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)

    def views(self) -> tuple[Tensor, ...]:
        """The tensors in it that are values, each once."""
        return each_once(reference() for reference in self.tensors)


class Tracking:
    """The values of a trace in the making, and what its operations do to them.

    Args:
        module: the root.
        changed_buffers: names of buffers that the step is known to change.
        borrows: whether parameters are lent for each operation, which writes them.

    Attributes:
        stack: the module calls that the step is in.
    """

    def __init__(self, module: nn.Module, changed_buffers: Collection[str], borrows: bool) -> None:
        self.trace = Trace()
        self.changed_buffers = changed_buffers
        self.borrows = borrows
        # By identity of the tensor; the module keeps these tensors, so no other one can have it.
        self.parameters: dict[int, str] = {}
        self.buffers: dict[int, str] = {}
        self._values = WeakIdKeyDictionary()  # which value a tensor is, for as long as there is the tensor
        self.stack: list[Call] = []
        self._storages: dict[StorageWeakRef, Storage] = {}  # the key keeps a storage's address from being used again
        self._num_storages = 0
        for name, parameter in module.named_parameters():
            self.parameters[id(parameter)] = name
            storage = self.storage_of(parameter)
            storage.bound = True
            storage.parameter = storage.parameter or name
        for name, buffer in module.named_buffers():
            self.buffers[id(buffer)] = name
            storage = self.storage_of(buffer)
            storage.buffer = storage.buffer or name

    # ---- values ----

    def storage_of(self, tensor: Tensor) -> Storage:
        """The storage of ``tensor``."""
        key = storage_key(tensor)
        if key in self._storages:
            return self._storages[key]
        storage = Storage(self._num_storages, tuple(self.stack))
        self._num_storages += 1
        if key is not None:
            self._storages[key] = storage
        return storage

    def refuse_whole(self, reason: str) -> None:
        """Let none of the modules whose calls the step is in be placed whole."""
        for call in self.stack:
            call.not_placeable = reason

    def add_opaque(self, calls: Calls, inputs: Values = (), parameters: Names = ()) -> int:
        """Record an operation in ``calls`` that was not seen; returns the event's index."""
        event = Event(len(self.trace.events), OPAQUE, calls, user_location(), inputs, parameters)
        self.trace.events.append(event)
        return event.index

    def track(self, tensor: Tensor, event: int, binds: bool = True) -> int:
        """From here on ``tensor`` is a new value, made by ``event``, which ``binds`` its memory if it wrote there."""
        values, storage = self.trace.values, self.storage_of(tensor)
        spec = TensorSpec.of(tensor)
        value = Value(
            index=len(values),
            event=event,
            spec=spec,
            storage=storage.number,
            sendable=tensor.layout == torch.strided and not tensor.is_nested,
            varies=not storage.varying.isdisjoint(spec.shape),
        )
        values.append(value)
        storage.bound = storage.bound or binds
        storage.tensors.append(weakref.ref(tensor))
        self._values[tensor] = value.index
        self.trace.events[event].made += (value.index,)
        return value.index

    def find_tracked(self, tensor: Tensor) -> int | None:
        """The value that ``tensor`` is known to be."""
        return self._values.get(tensor)  # type: ignore[no-any-return]

    def find(self, tensor: Any) -> int | None:
        """The value that ``tensor`` is; None for parameters, free tensors, and what is none."""
        if not isinstance(tensor, Tensor):
            return None
        value = self.find_tracked(tensor)
        if value is not None or id(tensor) in self.parameters or id(tensor) in self.buffers:
            return value
        # Not seen to be made: is what lies in its memory bound all the same? A view of a parameter, what an extension
        # made of one, or an alias of something that was changed in place comes here.
        storage = self.storage_of(tensor)
        if not storage.bound:
            return None
        event = self.add_opaque(storage.calls) if storage.opaque is None else storage.opaque
        return self.track(tensor, event)

    def add_versions(self, mutated: Collection[Tensor], arguments: list[Any], event: int) -> Iterator[InPlaceVersion]:
        """New values for tensors changed in place, and for every other view of their memory."""
        positions = {id(leaf): position for position, leaf in enumerate(arguments)}
        # A change in place changes every view of the memory. Which those are only this process can see: stages that
        # hold stand-ins follow what is written down here.
        for view in each_once(mutated, *(self.storage_of(tensor).views() for tensor in mutated)):
            if id(view) not in self.parameters and id(view) not in self.buffers:  # these stay on their stage
                old = self.find_tracked(view)
                yield InPlaceVersion(old, self.track(view, event), positions.get(id(view)))

    def spec_of(self, result: Any, arguments: list[Any]) -> OutputSpec:
        """Where each leaf of ``result`` comes from."""
        # Plain leaves are left out: small integers and None are one object wherever they are, which says nothing.
        positions = {id(leaf): position for position, leaf in enumerate(arguments) if not is_plain(leaf)}
        sources: list[tuple[str, Any]] = []
        for leaf in leaves(result):
            value = self.find_tracked(leaf) if isinstance(leaf, Tensor) else None
            if id(leaf) in positions:
                sources.append(("argument", positions[id(leaf)]))
            elif value is not None:
                # What an `autograd.Function` returns requires a gradient only after the last operation of its forward.
                self.trace.values[value].spec = TensorSpec.of(leaf)
                sources.append(("value", value))
            else:
                sources.append(("constant", leaf if is_plain(leaf) else None))
        skeleton = ... if isinstance(result, Tensor) else map_leaves(_blank, result)
        return OutputSpec(skeleton, tuple(sources))

    # ---- what an operation does ----

    def note_changes(self, event: Event, given: list[Tensor], mutated: Collection[Tensor]) -> None:
        """Which buffers and parameters it uses and changes."""
        storages = [self.storage_of(tensor) for tensor in mutated]
        changed = [storage.parameter for storage in storages]
        if not self.borrows or is_inplace(event.function):  # borrowing a parameter writes it, too
            changed += [self.parameters.get(id(tensor)) for tensor in mutated]  # by `p.data = ...`
        for name in each_once(changed)[:1]:
            self.trace.refusals.append(
                f"At {event.location} the step changes parameter {name!r} in place, which in a pipeline happens once "
                "for each micro-batch, while others are on their way. Do it in a hook (`on_train_batch_end`)."
            )
        event.buffers = each_once(storage.buffer for storage in storages)
        self.trace.changed_buffers.update(event.buffers)
        used = each_once(self.buffers.get(id(tensor)) for tensor in given)
        event.buffers_read = tuple(name for name in used if name in self.changed_buffers)

    def note_sizes(self, event: Event, given: list[Tensor], made: list[Tensor], arguments: list[Any]) -> None:
        """Which sizes of what ``event`` makes depend on values: those of a module, or of the batch."""
        deciding = deciding_tensors(event.name, arguments)
        event.sized_by_module = any(self.storage_of(tensor).bound for tensor in deciding)
        if deciding and not event.sized_by_module:
            self.trace.reads_batch = True
            # A stage that does not run the module would not know the size. Opened, its code runs on all stages, and
            # these have the batch whose values decide.
            self.refuse_whole(f"the size of a tensor at {event.location} depends on the batch's values")
        sized = given[:1] if event.name in PUTS_ROWS_BACK else given
        varying: set[int] = set().union(*(self.storage_of(tensor).varying for tensor in sized))
        if not event.sized_by_module and not varying:
            return
        fixed = {1}.union(*(TensorSpec.of(tensor).shape for tensor in given))
        for tensor in made:
            shape = TensorSpec.of(tensor).shape
            sizes = varying.intersection(shape)
            if event.sized_by_module:  # all rows may have been chosen, this time
                sizes.update(set(shape) - fixed or shape[:1])
            self.storage_of(tensor).varying |= sizes

    def note_free(self, event: Event, made: list[Tensor], mutated: Collection[Tensor]) -> None:
        """A free operation is done again by each stage, so its changes in place must not be hidden in a unit."""
        for tensor in made:
            storage = self.storage_of(tensor)
            storage.bound = storage.parameter is not None  # `empty_like` was seen to take something bound
        self.trace.reads_batch |= event.reads
        for tensor in mutated:
            storage = self.storage_of(tensor)
            if storage.views():  # these may be on another stage, which would not see the change
                self.add_opaque(tuple(self.stack))
            for call in self.stack:
                if call not in storage.calls:  # what it has made itself, nobody else misses
                    call.not_placeable = (
                        f"it changes a tensor in place, at {event.location}, that was made outside of it"
                    )

    def note_hook(self, tensor: Any) -> None:
        """The user's code puts a hook on the gradient of ``tensor``."""
        location, value = user_location(), self.find(tensor)
        if id(tensor) in self.parameters:
            self.trace.refusals.append(
                f"The step registers a hook on a parameter at {location}: in a pipeline this would happen for each "
                "micro-batch, on some stages alone. Register it in `__init__` or in `on_fit_start`."
            )
        if value is not None:
            self.trace.hooks.append(GradientHook(value, len(self.trace.events), tuple(self.stack), location))


def is_plain(leaf: Any) -> bool:
    """Whether a leaf may be repeated on another stage as it is."""
    return leaf is None or isinstance(leaf, _PLAIN)


def _blank(leaf: Any) -> Any:
    """What stands in a skeleton for a leaf; of the right kind, as some containers check."""
    if isinstance(leaf, Tensor):
        return _EMPTY
    return leaf if is_plain(leaf) else None
