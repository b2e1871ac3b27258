"""Tensors of a device on the host.

A copy from a device into ordinary memory goes through a small buffer of the driver's, and the host waits for each. So
here they go through two page-locked buffers, and copies of either kind overlap (:class:`Landing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20  # of a message

Place = Callable[[Tensor], object]
"""Takes the bytes out of a buffer that is used again afterwards."""

_TAG = 0  # of point-to-point messages; their order tells which is which
_ALIGNMENT = 16  # bytes; the widest element (complex128)
CPU = torch.device("cpu")


class Landing:
    """Bytes from a device, chunk by chunk; while one is on its way, the one before is put where it belongs.

    Call :meth:`finish` at the end.
    """

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._waiting: tuple[Any, Tensor, Place] | None = None  # an event, a buffer, and who takes it

    def land(self, chunk: Tensor, place: Place) -> None:
        """Let ``place`` have what is in ``chunk`` (uint8, flat, at most ``CHUNK_BYTES``) on the host, soon.

        ``chunk`` may be written by what is launched behind this.
        """
        if chunk.device.type == "cpu":
            place(chunk)
            return
        whole = self._buffers.pop(0)
        if whole.numel() < chunk.numel():
            whole = torch.empty(chunk.numel(), dtype=torch.uint8, pin_memory=True)
        self._buffers.append(whole)
        buffer = whole[: chunk.numel()]
        # buffer 0:  chunk 0 on its way | chunk 0 is taken out  | chunk 2 on its way ...
        # buffer 1:                     | chunk 1 on its way    | chunk 1 is taken out ...
        # The host takes one out while the device fills the other. A buffer is filled again only behind `finish`, which
        # has taken it out. The event is over with the copy: what is queued behind that is not waited for.
        buffer.copy_(chunk, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.finish()
        self._waiting = event, buffer, place

    def finish(self) -> None:
        """Wait for the chunk that is on its way, and let it be placed; without one nothing happens."""
        if self._waiting is None:
            return
        event, buffer, place = self._waiting
        self._waiting = None
        event.synchronize()
        place(buffer)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU: those that are there, and contiguous copies of the others."""
    landing = Landing()
    found = []
    for tensor in tensors:
        if tensor.device.type == "cpu":
            found.append(tensor)
            continue
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        source = bytes_of(tensor.detach().contiguous())
        target = bytes_of(copy)
        for chunk, part in zip(source.split(CHUNK_BYTES), target.split(CHUNK_BYTES), strict=True):
            landing.land(chunk, part.copy_)
        found.append(copy)
    landing.finish()
    return found


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
