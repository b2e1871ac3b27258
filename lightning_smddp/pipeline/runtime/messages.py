"""Tensors between two stages: small ones of a boundary in one message, each large one in a message of its own.

A message takes a backend about as long whether it carries 8 bytes or 8 KiB::

    tensors:   mask (2 KiB)   hidden (4 MiB)   bias (64 B)   positions (256 B)
    messages:  | mask | bias | positions |     hidden

Sender and receiver know the tensors' specs, so nothing is said about what is where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.capture.records import TensorSpec

_SMALL = 2**16  # bytes; copying a larger tensor costs more than its message

Specs: TypeAlias = tuple[TensorSpec, ...]


class Boundary(NamedTuple):
    """What one stage sends to the next for one micro-batch, and what comes back.

    Attributes:
        values: that are sent.
        trained: the positions of those that need a gradient.
        gradients: of these.
    """

    values: Specs
    trained: tuple[int, ...]
    gradients: Specs

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], train: bool) -> Boundary:
        """That of values like ``specs``; without a backward none needs a gradient."""
        trained = tuple(position for position, spec in enumerate(specs) if train and spec.requires_grad)
        return cls(tuple(specs), trained, tuple(specs[position] for position in trained))


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

    def begin_step(self, specs: Sequence[Specs]) -> None:
        """``specs``: of what comes for each micro-batch."""
        self._specs = specs
        self._arriving: dict[int, list[Any]] = {}
        self._shared: dict[int, Tensor] = {}  # messages of small tensors
        self._tensors: dict[int, Sequence[Tensor | None]] = {}

    def receives(self, microbatch: int) -> list[dist.P2POp]:
        """Receives for torch's schedule to start; none where they are started here."""
        if not self._ahead:
            return self._ops(dist.irecv, self._open(microbatch))
        for early in range(microbatch, min(microbatch + 2, len(self._specs))):
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
        tensors: Any = self._tensors.pop(microbatch, ())
        shared = self._shared.pop(microbatch, None)
        if shared is not None:
            small, _ = _small_and_large(tensors)
            for tensor, part in zip(small, shared.split([tensor.nbytes for tensor in small]), strict=True):
                _bytes(tensor).copy_(part)
        return tensors

    def sends(self, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        """Sends for torch's schedule to start."""
        small, messages = _small_and_large([tensor.resolve_conj().contiguous() for tensor in tensors])
        if small:
            messages = [torch.cat(list(map(_bytes, small))), *messages]
        return self._ops(dist.isend, messages)

    def _open(self, microbatch: int) -> list[Tensor]:
        tensors = [spec.empty(self._device) for spec in self._specs[microbatch]]
        self._tensors[microbatch] = tensors
        small, messages = _small_and_large(tensors)
        if small:
            nbytes = sum(tensor.nbytes for tensor in small)
            self._shared[microbatch] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            messages = [self._shared[microbatch], *messages]
        return messages

    def _ops(self, op: Any, messages: Sequence[Tensor]) -> list[dist.P2POp]:
        return [dist.P2POp(op, message, group=self._group, group_peer=self._rank) for message in messages]


def _small_and_large(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that share a message, and those that have their own. Those without elements do not travel."""
    present = [tensor for tensor in tensors if tensor.numel()]
    small = [tensor for tensor in present if tensor.nbytes < _SMALL]
    if len(small) < 2:
        return [], present
    return small, [tensor for tensor in present if tensor.nbytes >= _SMALL]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
