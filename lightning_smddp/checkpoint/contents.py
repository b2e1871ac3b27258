"""What a checkpoint file will contain: how large it becomes, and a copy of it in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

import torch
from torch import Tensor

Dump = Callable[[Any], None]
"""Writes a checkpoint to the object that it is given, by calling its ``write``."""

_PER_TENSOR = 512  # headers and alignment
_REST = 2**16


def dump_of(checkpoint: Any) -> Dump:
    """``torch.save`` of ``checkpoint``, when called."""

    def dump(file: Any) -> None:
        torch.save(checkpoint, file)

    return dump


def bytes_needed(checkpoint: Any) -> int:
    """About how many bytes ``torch.save`` writes: those of the tensors, shared memory once, and some for the rest."""
    sizes: dict[Any, int] = {}
    for tensor in _tensors(checkpoint, set()):
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr() or id(tensor)] = storage.nbytes() + _PER_TENSOR
    return sum(sizes.values()) + _REST


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item, seen)


class Snapshot:
    """A checkpoint as ``torch.save`` writes it, in CPU memory: nothing that happens to the original changes it.

    Takes as much memory as the file will have. The pieces are kept as they come: one growing buffer would be copied
    again and again.
    """

    def __init__(self, checkpoint: Any) -> None:
        self._pieces: list[bytes] = []
        torch.save(checkpoint, cast(IO[bytes], self))  # of a file it needs `write` only

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(piece) for piece in self._pieces)

    def write(self, data: Any) -> int:
        """Keep a copy of ``data``; called by ``torch.save``."""
        self._pieces.append(bytes(data))
        return len(self._pieces[-1])

    def flush(self) -> None:
        """Do nothing; called by ``torch.save``."""

    def dump(self, file: Any) -> None:
        """Write all to ``file``."""
        for piece in self._pieces:
            file.write(piece)
