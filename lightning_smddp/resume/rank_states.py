"""What each rank has to say in a checkpoint, brought together without pickle: JSON, and the bytes of tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.wire.encode import Path, decode, dtype_of, encode, name_of_dtype
from lightning_smddp.wire.gather import gather_bytes

_LENGTH_BYTES = 8


def gather_states(state: Any, device: torch.device) -> list[Any]:
    """Every rank's ``state``, in the order of global ranks, on the first rank; an empty list on the others.

    Collective over the world, if there is one.

    Args:
        state: what :func:`~lightning_smddp.wire.encode.encode` takes; tensors of the CPU.
        device: where the group's collectives take their tensors from.
    """
    packed = pack(state)
    if not dist.is_initialized():
        return [unpack(packed)]
    world = dist.group.WORLD
    assert world is not None
    gathered = gather_bytes(packed.to(device), world)
    if world.rank() != 0:
        return []
    return [unpack(data) for data in gathered]


def pack(state: Any) -> Tensor:
    """``state`` as one tensor of bytes: the length of the header (8), the header, the tensors; equal tensors once."""
    tensors: dict[Path, Tensor] = {}
    plain = encode(state, tensors)
    offsets: dict[bytes, int] = {}
    end = 0
    specs = []
    for path, tensor in tensors.items():
        flat = tensor.detach().contiguous().flatten()
        data = flat.view(torch.uint8).numpy().tobytes()
        if data not in offsets:
            offsets[data] = end
            end += len(data)
        specs.append([path, name_of_dtype(tensor.dtype), list(tensor.shape), offsets[data], len(data)])
    header = json.dumps([plain, specs]).encode()
    message = bytearray(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
    for data in offsets:
        message += data
    return torch.frombuffer(message, dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """The inverse of :func:`pack`; what was equal is one tensor."""
    message = data.cpu().numpy().tobytes()
    begin = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
    plain, specs = json.loads(message[_LENGTH_BYTES:begin])
    found: dict[tuple[str, int, int], Tensor] = {}
    tensors: dict[Path, Tensor] = {}
    for path, dtype, shape, offset, length in specs:
        key = (dtype, offset, length)
        if key not in found:
            start = begin + offset
            own = bytearray(message[start : start + length])
            found[key] = torch.empty(0, dtype=dtype_of(dtype))
            if own:
                found[key] = torch.frombuffer(own, dtype=dtype_of(dtype))
        tensors[tuple(path)] = found[key].view(shape)
    return decode(plain, tensors)
