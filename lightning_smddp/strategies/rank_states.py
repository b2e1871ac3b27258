"""What each rank has to say in a checkpoint, brought together without pickle: JSON, and the bytes of tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_TENSOR = "tensor"  # marks what stands for one: {"tensor": [dtype, shape, begin, end]}


def gather_states(state: Any, device: torch.device) -> list[Any]:
    """Every rank's ``state``, in the order of global ranks, on every rank. Collective over the world, if there is one.

    Args:
        state: dicts (with strings as keys, but not only "tensor"), lists, tensors of the CPU, numbers, strings, None.
        device: where the group's collectives take their tensors from.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [unpack(pack(state))]
    data = pack(state).to(device)
    length = torch.tensor([data.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    padded = torch.zeros(int(torch.stack(lengths).max()), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [unpack(part[: int(n)]) for part, n in zip(parts, lengths, strict=True)]


def pack(state: Any) -> Tensor:
    """``state`` as one tensor of bytes: the length of the header (8), the header, the tensors; equal tensors once."""
    places: dict[bytes, int] = {}
    chunks: list[bytes] = []

    def encode(value: Any) -> Any:
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            if data not in places:
                places[data] = sum(map(len, chunks))
                chunks.append(data)
            begin = places[data]
            return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), begin, begin + len(data)]}
        if isinstance(value, dict):
            return {key: encode(member) for key, member in value.items()}
        if isinstance(value, (list, tuple)):
            return [encode(member) for member in value]
        return value

    header = json.dumps(encode(state)).encode()
    message = len(header).to_bytes(8, "little") + header + b"".join(chunks)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """The inverse of :func:`pack`; tuples come back as lists."""
    message = np.asarray(data.cpu())
    end = 8 + int.from_bytes(message[:8].tobytes(), "little")
    found: dict[tuple[int, int], Tensor] = {}

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(member) for member in value]
        if not isinstance(value, dict):
            return value
        if set(value) != {_TENSOR}:
            return {key: decode(member) for key, member in value.items()}
        dtype, shape, begin, stop = value[_TENSOR]
        if (begin, stop) not in found:
            data = bytearray(message[end + begin : end + stop].tobytes())
            kind = getattr(torch, dtype)
            found[begin, stop] = (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)).view(
                shape
            )
        return found[begin, stop]

    return decode(json.loads(message[8:end].tobytes()))
