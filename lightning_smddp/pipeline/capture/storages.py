"""Which storages a step uses: who made them, and whether what is in them depends on a parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_smddp._compat.torch import storage_key


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
            memory.bound, memory.parameter = True, memory.parameter or name
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
