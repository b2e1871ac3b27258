"""What each rank has to say in a checkpoint, brought together without pickle: JSON, and the bytes of tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.wire.encode import Path, decode, dtype_of, encode, name_of_dtype
from lightning_smddp.wire.gather import gather_bytes


def gather_states(state: Any, device: torch.device) -> list[Any]:
    """Every rank's ``state``, in the order of global ranks, on the first rank; an empty list on the others.

    Collective over the world, if there is one.

    Args:
        state: what :func:`~lightning_smddp.wire.encode.take_out` takes; tensors of the CPU.
        device: where the group's collectives take their tensors from.
    """
    packed = pack(state)
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return [unpack(packed)]
    everyones = gather_bytes(packed.to(device), world)
    return [unpack(data) for data in everyones] if world.rank() == 0 else []


def pack(state: Any) -> Tensor:
    """``state`` as one tensor of bytes: the length of the header (8), the header, the tensors; equal tensors once."""
    tensors: dict[Path, Tensor] = {}
    plain = encode(state, tensors)
    places: dict[bytes, int] = {}
    specs = []
    end = 0
    for path, tensor in tensors.items():
        data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if data not in places:
            places[data] = end
            end += len(data)
        specs.append([path, name_of_dtype(tensor.dtype), list(tensor.shape), places[data], len(data)])
    header = json.dumps([plain, specs]).encode()
    message = len(header).to_bytes(8, "little") + header + b"".join(places)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """The inverse of :func:`pack`; what was equal is one tensor."""
    message = np.asarray(data.cpu()).tobytes()
    begin = 8 + int.from_bytes(message[:8], "little")
    plain, specs = json.loads(message[8:begin])
    found: dict[tuple[str, int, int], Tensor] = {}
    tensors: dict[Path, Tensor] = {}
    for path, dtype, shape, offset, length in specs:
        key = (dtype, offset, length)
        if key not in found:
            own = bytearray(message[begin + offset : begin + offset + length])
            found[key] = torch.frombuffer(own, dtype=dtype_of(dtype)) if own else torch.empty(0, dtype=dtype_of(dtype))
        tensors[tuple(path)] = found[key].view(shape)
    return decode(plain, tensors)
