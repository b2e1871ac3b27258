"""Tensors between two stages: small ones of a boundary in one message, each large one in a message of its own.

A message takes a backend about as long whether it carries 8 bytes or 8 KiB::

    tensors:   mask (2 KiB)   hidden (4 MiB)   bias (64 B)   positions (256 B)
    messages:  | mask | bias | positions |     hidden

Sender and receiver work from the same specs, so nothing is said about what is where.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_smddp.pipeline.runtime.remote import TensorSpec

_SMALL = 2**16  # bytes; copying a larger tensor costs more than its message
_ALIGNMENT = 16  # bytes, the size of the largest element


@dataclass(frozen=True)
class MessageLayout:
    """How the tensors of one boundary travel. Those without elements do not: not every backend takes empty messages.

    Attributes:
        specs: of all tensors.
        offsets: byte at which each begins in the shared message; None for one that does not travel in it.
        nbytes: of the shared message; 0 where there is none.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int | None, ...]
    nbytes: int

    def receive(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Messages to receive on ``device``, and the tensors whose memory these are."""
        messages: list[Tensor] = []
        tensors: list[Tensor] = []
        if self.nbytes:
            shared = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            messages.append(shared)
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            if offset is None:
                tensor = spec.empty(device)
                if tensor.numel():
                    messages.append(tensor)
            else:
                # No views of the message: a change of one in place would count as a change of all.
                tensor = torch.empty(0, dtype=spec.dtype, device=device)
                count = math.prod(spec.shape)
                tensor.set_(shared.untyped_storage(), offset // spec.dtype.itemsize, (count,), (1,))
                tensor = tensor.view(spec.shape)
            tensors.append(tensor)
        return messages, tensors

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The messages that carry ``tensors``, which are as :attr:`specs` says."""
        messages: list[Tensor] = []
        if self.nbytes:
            shared = torch.empty(self.nbytes, dtype=torch.uint8, device=tensors[0].device)
            messages.append(shared)
        for tensor, offset in zip(tensors, self.offsets, strict=True):
            if offset is not None:
                end = offset + tensor.numel() * tensor.element_size()
                shared[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            elif tensor.numel():
                messages.append(tensor.contiguous())
        return messages


@functools.lru_cache(maxsize=4096)
def layout_of(specs: tuple[TensorSpec, ...]) -> MessageLayout:
    """The layout for tensors like ``specs``."""
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs]
    shares = [0 < size < _SMALL for size in sizes]
    if sum(shares) < 2:  # nothing to share: the tensor itself is the message
        return MessageLayout(specs, (None,) * len(specs), 0)
    offsets: list[int | None] = []
    end = 0
    for size, is_shared in zip(sizes, shares, strict=True):
        if not is_shared:
            offsets.append(None)
            continue
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return MessageLayout(specs, tuple(offsets), end)
