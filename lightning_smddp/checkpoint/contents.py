"""What a checkpoint file will contain: how large it becomes, and a copy of it in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

import torch
from torch import Tensor

from lightning_smddp.wire.host_copies import to_host

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
    """A checkpoint as it is now, in CPU memory: nothing that happens to the original changes it.

    Takes as much memory as the file will have. What it takes is a copy of the tensors' memory; it becomes a file in
    :meth:`dump`, maybe in another thread. Objects that cannot be copied are made a file of at once.
    """

    dump: Dump
    size: int  # in bytes

    def __init__(self, checkpoint: Any) -> None:
        try:
            copied = _copied(checkpoint)
        except Exception:  # whatever an object's own way to be copied raises; pickle may do
            pieces = _Pieces()
            torch.save(checkpoint, cast(IO[bytes], pieces))  # of a file it needs `write` only
            self.size, self.dump = sum(map(len, pieces.found)), pieces.dump
        else:
            self.size, self.dump = bytes_needed(copied), dump_of(copied)


class _Pieces:
    """What ``torch.save`` writes. Kept as it comes: one growing buffer would be copied again and again."""

    def __init__(self) -> None:
        self.found: list[bytes] = []

    def write(self, data: Any) -> int:
        """Keep a copy of ``data``."""
        self.found.append(bytes(data))
        return len(self.found[-1])

    def flush(self) -> None:
        """Do nothing; called by ``torch.save``."""

    def dump(self, file: Any) -> None:
        """Write all to ``file``."""
        for piece in self.found:
            file.write(piece)


def _copied(checkpoint: Any) -> Any:
    """A deep copy with all tensors on the CPU, in which tensors that share memory still do."""
    tensors = {id(tensor): tensor for tensor in _tensors(checkpoint, set()) if _is_plain(tensor)}
    memory = {_memory(tensor): tensor.untyped_storage() for tensor in tensors.values()}
    flats = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in memory.values()]
    copies = [here.clone() if here is flat else here for flat, here in zip(flats, to_host(flats), strict=True)]
    storages = dict(zip(memory, copies, strict=True))
    memo: dict[int, Any] = {}
    for number, tensor in tensors.items():
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(storages[_memory(tensor)].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        memo[number] = made.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            memo[number] = torch.nn.Parameter(made.detach(), tensor.requires_grad)
    return copy.deepcopy(checkpoint, memo)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory, shape and strides are all there is to it."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or vars(tensor):
        return False
    dense = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested
    return dense and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
