"""Generators in a batch: they give their entries once, but a step is run several times on the same batch."""

from __future__ import annotations

from types import GeneratorType
from typing import Any

from lightning_smddp.wire.pytree import leaves, map_leaves

_ONCE = (GeneratorType, map, zip, filter)


class RepeatableIterator:
    """An iterator over what another one gave; each copy of it begins anew."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries, self.place = entries, 0

    def __iter__(self) -> RepeatableIterator:
        return self

    def __next__(self) -> Any:
        if self.place == len(self.entries):
            raise StopIteration
        self.place += 1
        return self.entries[self.place - 1]


def repeatable(batch: Any) -> Any:
    """``batch`` with :class:`RepeatableIterator` in place of its generators, which are exhausted for it."""
    if not any(isinstance(leaf, _ONCE) for leaf in leaves(batch)):
        return batch
    return map_leaves(lambda leaf: RepeatableIterator(list(leaf)) if isinstance(leaf, _ONCE) else leaf, batch)
