"""Tensors between two stages: small ones of a boundary in one message, each large one in a message of its own.

A message takes a backend about as long whether it carries 8 bytes or 8 KiB::

    tensors:   mask (2 KiB)   hidden (4 MiB)   bias (64 B)   positions (256 B)
    messages:  | mask | bias | positions |     hidden

Sender and receiver work from the same specs, so nothing is said about what is where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.capture.records import TensorSpec

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


@dataclass(frozen=True)
class Boundary:
    """What one stage sends to the next for one micro-batch, and what comes back.

    Attributes:
        values: how they travel.
        trained: the positions of those that need a gradient.
        gradients: how these travel.
    """

    values: MessageLayout
    trained: tuple[int, ...]
    gradients: MessageLayout

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], train: bool) -> Boundary:
        """That of values like ``specs``; without a backward none needs a gradient."""
        trained = tuple(position for position, spec in enumerate(specs) if train and spec.requires_grad)
        return cls(layout_of(tuple(specs)), trained, layout_of(tuple(specs[position] for position in trained)))


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


class Neighbour:
    """The stage before or behind one, during a step: what comes from it, and what goes there.

    Args:
        group: the ranks of the pipeline.
        rank: in ``group``, that has the other stage; None where there is none.
        device: where messages are received.
        ahead: whether a receive is started one micro-batch early. By gloo a message travels only when its
            receiver asks for it: so it does while this rank computes. All messages of that rank have to be of one
            stage then, in the order of micro-batches.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int | None, device: torch.device, ahead: bool) -> None:
        self._group = group
        self._rank = rank
        self._device = device
        self._ahead = ahead
        self.begin_step(())

    def begin_step(self, layouts: Sequence[MessageLayout]) -> None:
        """``layouts``: of what comes for each micro-batch."""
        self._layouts = layouts
        self._arriving: dict[int, list[Any]] = {}
        self._tensors: dict[int, Sequence[Tensor | None]] = {}

    def receives(self, microbatch: int) -> list[dist.P2POp]:
        """Receives for torch's schedule to start; none where they are started here."""
        if not self._ahead:
            return self._ops(dist.irecv, self._open(microbatch))
        for early in range(microbatch, min(microbatch + 2, len(self._layouts))):
            if early not in self._arriving:
                messages = self._open(early)
                works = [dist.irecv(message, group=self._group, group_src=self._rank) for message in messages]
                self._arriving[early] = works
        return []

    def put(self, microbatch: int, tensors: Sequence[Tensor | None]) -> None:
        """In place of a receive, when the other stage is on this rank."""
        self._tensors[microbatch] = tensors

    def take(self, microbatch: int) -> Any:
        """What has come; nobody has it here any more."""
        for work in self._arriving.pop(microbatch, ()):
            work.wait()
        return self._tensors.pop(microbatch, ())

    def sends(self, layout: MessageLayout, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        """Sends for torch's schedule to start."""
        return self._ops(dist.isend, layout.send(tensors))

    def _open(self, microbatch: int) -> list[Tensor]:
        messages, self._tensors[microbatch] = self._layouts[microbatch].receive(self._device)
        return messages

    def _ops(self, op: Any, messages: Sequence[Tensor]) -> list[dist.P2POp]:
        return [dist.P2POp(op, message, group=self._group, group_peer=self._rank) for message in messages]
