"""Small messages between ranks as tensors of JSON bytes: nothing received is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def to_bytes(value: Any, device: torch.device) -> Tensor:
    """``value``, which JSON carries, as a flat tensor of uint8 on ``device``."""
    data = bytearray(json.dumps(value).encode())  # of bytes, `frombuffer` warns that they cannot be written
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def from_bytes(data: Tensor) -> Any:
    """The inverse of :func:`to_bytes`; reads a tensor of a device."""
    return json.loads(data.cpu().numpy().tobytes())


def gather_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's ``value`` (anything that JSON carries), in rank order, on every rank."""
    messages = gather_bytes(to_bytes(value, device), group)
    return [from_bytes(data) for data in messages]


def first_reason(reasons: Iterable[str | None]) -> str | None:
    """The first one that is there, of what ranks have told in their order: so the same on every rank."""
    for reason in reasons:
        if reason:
            return reason
    return None


def gather_bytes(data: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's ``data`` (uint8, flat, where the group's messages are), in rank order, on every rank."""
    # An all-gather takes messages of one length: so the lengths first, then all of them as long as the longest.
    length = torch.tensor([data.numel()], device=data.device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    longest = int(torch.stack(lengths).max())
    padded = data.new_zeros(longest)
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    messages = []
    for part, own_length in zip(parts, lengths, strict=True):
        messages.append(part[: int(own_length)])
    return messages


def broadcast_json(
    value: Any,
    group: dist.ProcessGroup,
    device: torch.device,
    group_src: int = 0,
) -> Any:
    """The ``value`` (anything that JSON carries) of the rank ``group_src`` of ``group`` on every rank. Collective."""
    # The others do not know how long the value is: so the length first.
    data = to_bytes(value, device)
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, group=group, group_src=group_src)
    if group.rank() != group_src:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, group=group, group_src=group_src)
    return from_bytes(data)
