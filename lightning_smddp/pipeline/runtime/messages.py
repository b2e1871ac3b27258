"""Tensors between two stages: small ones of a boundary in one message, each large one in a message of its own.

A message takes a backend about as long whether it carries 8 bytes or 8 KiB::

    tensors:   mask (2 KiB)   hidden (4 MiB)   bias (64 B)   positions (256 B)
    messages:  | mask | bias | positions |     hidden

Sender and receiver know the tensors' specs, so nothing is said about what is where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.capture.records import TensorSpec

_SMALL = 2**16  # bytes; copying a larger tensor costs more than its message


class Layout(NamedTuple):
    """How tensors travel. Those without elements do not: not every backend takes empty messages.

    Attributes:
        specs: of all of them.
        small: positions of those that share a message.
        large: of those that have their own.
    """

    specs: Sequence[TensorSpec]
    small: Sequence[int]
    large: Sequence[int]

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> Layout:
        """That of tensors like ``specs``."""
        sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs]
        present = [position for position, size in enumerate(sizes) if size]
        small = [position for position in present if sizes[position] < _SMALL]
        if len(small) < 2:
            return cls(specs, (), present)
        return cls(specs, small, [position for position in present if position not in small])


class Boundary(NamedTuple):
    """What one stage sends to the next for one micro-batch, and what comes back.

    Attributes:
        values: that are sent.
        trained: the positions of those that need a gradient.
        gradients: of these.
    """

    values: Layout
    trained: Sequence[int]
    gradients: Layout

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], train: bool) -> Boundary:
        """That of values like ``specs``; without a backward none needs a gradient."""
        trained = [position for position, spec in enumerate(specs) if train and spec.requires_grad]
        return cls(Layout.of(specs), trained, Layout.of([specs[position] for position in trained]))


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

    def begin_step(self, layouts: Sequence[Layout]) -> None:
        """``layouts``: of what comes for each micro-batch."""
        self._layouts = layouts
        self._arriving: dict[int, list[Any]] = {}
        self._shared: dict[int, Tensor] = {}  # messages of small tensors
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
        tensors: Any = self._tensors.pop(microbatch, ())
        shared = self._shared.pop(microbatch, None)
        if shared is not None:
            small = [tensors[position] for position in self._layouts[microbatch].small]
            for tensor, part in zip(small, shared.split([tensor.nbytes for tensor in small]), strict=True):
                _bytes(tensor).copy_(part)
        return tensors

    def sends(self, layout: Layout, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        """Sends of ``tensors``, which are as ``layout`` says, for torch's schedule to start."""
        plain = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        messages = [plain[position] for position in layout.large]
        if layout.small:
            messages.insert(0, torch.cat([_bytes(plain[position]) for position in layout.small]))
        return self._ops(dist.isend, messages)

    def _open(self, microbatch: int) -> list[Tensor]:
        layout = self._layouts[microbatch]
        tensors = [spec.empty(self._device) for spec in layout.specs]
        self._tensors[microbatch] = tensors
        messages = [tensors[position] for position in layout.large]
        if layout.small:
            nbytes = sum(tensors[position].nbytes for position in layout.small)
            self._shared[microbatch] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            messages.insert(0, self._shared[microbatch])
        return messages

    def _ops(self, op: Any, messages: Sequence[Tensor]) -> list[dist.P2POp]:
        return [dist.P2POp(op, message, group=self._group, group_peer=self._rank) for message in messages]


def _bytes(tensor: Tensor) -> Tensor:
    # Of a single element the stride may be any, also where torch says contiguous.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
