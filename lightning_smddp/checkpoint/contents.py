"""What a checkpoint file will contain: how large it becomes, and a copy of it in memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.wire.stream import to_host

Dump = Callable[[Any], None]
"""Writes a checkpoint to the object that it is given, by calling its ``write``."""

_PER_TENSOR = 512  # bytes: headers and alignment
_BESIDE_TENSORS = 2**16  # bytes, about: the pickle, and the zip file's table


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
            sizes[_memory(tensor)] = tensor.untyped_storage().nbytes() + _PER_TENSOR
    return sum(sizes.values()) + _BESIDE_TENSORS


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in containers within containers; ``seen``: ids of those passed already, which may hold themselves."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        members: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        members = value
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for member in members:
        yield from _tensors(member, seen)


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
            file = io.BytesIO()
            torch.save(checkpoint, file)
            contents = file.getbuffer()
            self.size = contents.nbytes
            self.dump = lambda file: file.write(contents)
        else:
            self.size = bytes_needed(copied)
            self.dump = dump_of(copied)


def _copied(checkpoint: Any) -> Any:
    """A deep copy with all tensors on the CPU, in which tensors that share memory still do."""
    # Three steps: each memory as one flat tensor of bytes, however many tensors are views of it; a copy of each of
    # these on the host; and of each tensor the same view of the copy.
    tensors = [tensor for tensor in _tensors(checkpoint, set()) if _is_plain(tensor)]
    flats: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flats[_memory(tensor)] = flat.set_(storage)
    on_host = to_host(list(flats.values()))
    copies: dict[int, Tensor] = {}
    for (memory, flat), copied in zip(flats.items(), on_host, strict=True):
        if copied is flat:  # it was there already
            copied = flat.clone()
        copies[memory] = copied
    # What `deepcopy` finds in its memo it does not copy.
    memo: dict[int, Any] = {}
    for tensor in tensors:
        storage = copies[_memory(tensor)].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            memo[id(tensor)] = torch.nn.Parameter(view, tensor.requires_grad)
        else:
            memo[id(tensor)] = view.requires_grad_(tensor.requires_grad)
    return copy.deepcopy(checkpoint, memo)


def _memory(tensor: Tensor) -> int:
    """Equal for tensors that share memory; one without memory is by itself."""
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory, shape and strides are all there is to it."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or vars(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
