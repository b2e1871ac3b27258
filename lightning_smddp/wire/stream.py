"""Tensors of any shape and dtype between ranks, in flat chunks of bounded size, bit by bit.

A copy from a device into ordinary memory goes through a small buffer of the driver's, and the host waits for each. So
here they go through two page-locked buffers, and copies of either kind overlap (:class:`Landing`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.objects import broadcast, gather
from lightning_smddp.wire.encode import dtype_of, is_dense, name_of_dtype
from lightning_smddp.wire.pytree import map_leaves

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


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """What a receiver has to know of ``tensor`` to make room for it."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @classmethod
    def from_json(cls, value: Any) -> Spec:
        """From :meth:`to_json`. Raises ``ValueError`` for what is no dtype."""
        shape, name = value
        return cls(tuple(shape), dtype_of(name))

    def to_json(self) -> list[Any]:
        """Shape and name of the dtype."""
        return [list(self.shape), name_of_dtype(self.dtype)]

    @property
    def numel(self) -> int:
        """Number of elements: 1 of a scalar, 0 of an empty tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class _Part:
    """Elements [begin, end) of tensor number ``index``, at byte ``offset`` of a chunk."""

    index: int
    begin: int
    end: int
    offset: int

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        """Its view in the tensors, which are flat."""
        return flats[self.index][self.begin : self.end]

    def within(self, chunk: Tensor, specs: Sequence[Spec]) -> Tensor:
        """Its view in the chunk."""
        dtype = specs[self.index].dtype
        nbytes = (self.end - self.begin) * dtype.itemsize
        return chunk[self.offset : self.offset + nbytes].view(dtype)


def broadcast_tensors(
    specs: Sequence[Spec],
    tensors: Sequence[Tensor] | None,
    group: dist.ProcessGroup,
    source: int,
    device: torch.device,
) -> None:
    """Write rank ``source``'s ``tensors`` into everyone's, in place. Collective.

    Args:
        specs: of all tensors, the same on every rank.
        tensors: of these specs, anywhere in memory; None on a rank that takes part but does not want them.
        group: the ranks.
        source: rank in ``group``.
        device: where ``group``'s backend has its messages.
    """
    is_source = group.rank() == source
    flats = None
    if tensors is not None:
        flats = _flat(tensors)
    for parts, size in _chunks(specs):
        chunk = torch.empty(size, dtype=torch.uint8, device=device)
        if is_source:
            assert flats is not None
            for part in parts:
                part.within(chunk, specs).copy_(part.of(flats))
        dist.broadcast(chunk, group=group, group_src=source)
        if not is_source and flats is not None:
            for part in parts:
                part.of(flats).copy_(part.within(chunk, specs))
    if is_source or tensors is None or flats is None:
        return
    # A contiguous tensor's flat view is its own memory, which has the values now; of others the flat one is a copy.
    for tensor, flat in zip(tensors, flats, strict=True):
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))


def _send_tensors(
    specs: Sequence[Spec],
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    target: int,
    device: torch.device,
) -> None:
    """Send ``tensors`` to rank ``target``, which calls :func:`_receive_tensors`."""
    flats = _flat(tensors)
    under_way: deque[torch.cuda.Event] = deque()
    for parts, size in _chunks(specs):
        chunk = torch.empty(size, dtype=torch.uint8, device=device)
        for part in parts:
            part.within(chunk, specs).copy_(part.of(flats))
        group.send([chunk], target, _TAG).wait()  # also of groups that torch.distributed has no names for
        if device.type == "cuda":
            # Waiting for a message made the device's stream wait, not the host, which is to run ahead by two chunks and
            # not by all of them.
            event = torch.cuda.Event()
            event.record()
            under_way.append(event)
            if len(under_way) > 2:
                under_way.popleft().synchronize()


def _receive_tensors(
    specs: Sequence[Spec],
    group: dist.ProcessGroup,
    source: int,
    device: torch.device,
) -> list[Tensor]:
    """What rank ``source`` sends with :func:`_send_tensors`, on the CPU."""
    tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    flats = [tensor.view(-1) for tensor in tensors]
    landing = Landing()

    def unpack(chunk: Tensor, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.of(flats).copy_(part.within(chunk, specs))

    for parts, size in _chunks(specs):
        chunk = torch.empty(size, dtype=torch.uint8, device=device)
        group.recv([chunk], source, _TAG).wait()
        landing.land(chunk, partial(unpack, parts=parts))
    landing.finish()
    return tensors


def gather_tensors(
    local: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    to_all: bool,
    device: torch.device = CPU,
) -> dict[str, Tensor]:
    """The union of all ranks' named tensors, on the CPU. Collective.

    Args:
        local: of this rank; a name belongs to one rank only.
        group: the ranks.
        to_all: False leaves all ranks but the first with an empty dict.
        device: where ``group``'s backend has its messages.

    Returns:
        Copies of the others' tensors; this rank's own are those of ``local`` where they are on the CPU.
    """
    result: dict[str, Tensor] = {}
    for share in gathered_shares(local, group, to_all, device):
        result |= share
    return result


def gathered_shares(
    local: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    to_all: bool,
    device: torch.device = CPU,
) -> Iterator[dict[str, Tensor]]:
    """What :func:`gather_tensors` gives, of one rank after the other. Collective: to be gone through to its end."""
    rank = group.rank()
    announced = gather({name: Spec.of(tensor) for name, tensor in local.items()}, group)
    for source, named_specs in enumerate(announced):
        specs = list(named_specs.values())
        tensors: list[Tensor] = []
        if source == rank:
            tensors = [tensor.detach() for tensor in local.values()]
        elif to_all:
            tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
        if to_all:
            broadcast_tensors(specs, tensors, group, source, device)
        elif source == rank != 0:
            _send_tensors(specs, tensors, group, 0, device)
        elif source != rank == 0:
            tensors = _receive_tensors(specs, group, source, device)
        if to_all or rank == 0:
            yield dict(zip(named_specs, to_host(tensors), strict=True))


class _Hole(int):
    """Stands for the tensor of this number in a structure without tensors."""


def gathered_objects(local: Any, group: dist.ProcessGroup, to_all: bool, device: torch.device) -> Iterator[Any]:
    """Every rank's ``local``, one rank's after the other. Collective: to be gone through to its end.

    Tensors in it are sent as :func:`gathered_shares` does, and are on the CPU; the rest is pickled.
    """
    outline, found = _taken_apart(local)
    outlines = gather(outline, group)
    shares = gathered_shares({str(number): tensor for number, tensor in enumerate(found)}, group, to_all, device)
    for of_rank, share in zip(outlines, shares, strict=False):  # a rank may get no shares
        yield _put_together(of_rank, list(share.values()))


def broadcast_object(value: Any, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    """The ``value`` of the rank ``source`` of ``group``, on every rank. Collective.

    Tensors in it are streamed, and arrive on ``device``, or on the CPU where they were there; the rest is pickled.

    Raises:
        UnsendableError: on every rank.
    """
    outline, tensors = _taken_apart(value)
    announced = broadcast((outline, [(Spec.of(tensor), tensor.is_cpu) for tensor in tensors]), group, source)
    if group.rank() != source:
        outline, specs = announced
        tensors = []
        for spec, is_cpu in specs:
            tensors.append(torch.empty(spec.shape, dtype=spec.dtype, device=CPU if is_cpu else device))
    broadcast_tensors([Spec.of(tensor) for tensor in tensors], tensors, group, source, device)
    return value if group.rank() == source else _put_together(outline, tensors)


def _taken_apart(value: Any) -> tuple[Any, list[Tensor]]:
    found: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not is_dense(leaf):
            return leaf
        found.append(leaf.detach())
        return _Hole(len(found) - 1)

    return map_leaves(take, value), found


def _put_together(outline: Any, tensors: Sequence[Tensor]) -> Any:
    return map_leaves(lambda leaf: tensors[leaf] if isinstance(leaf, _Hole) else leaf, outline)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with one dimension: views, but of those that are not contiguous copies."""
    return [tensor.detach().contiguous().view(-1) for tensor in tensors]


def _chunks(specs: Sequence[Spec]) -> Iterator[tuple[list[_Part], int]]:
    """What lies in each chunk, and its bytes. Tensors larger than a chunk are cut."""
    # tensors:  | a | b | c ..................... | d |
    # chunks:   | a | b | c ...|| c ..........|| c .. | d |    each part begins at a multiple of `_ALIGNMENT`
    # Both sides compute this from the specs alone, so no message says what is where.
    parts: list[_Part] = []
    used = 0
    for index, spec in enumerate(specs):
        numel, itemsize = spec.numel, spec.dtype.itemsize
        begin = 0
        while begin < numel:
            offset = -(-used // _ALIGNMENT) * _ALIGNMENT  # rounded up
            room = (CHUNK_BYTES - offset) // itemsize  # elements; below 1: the chunk is full
            if room < 1:
                yield parts, used
                parts, used = [], 0
                continue
            end = min(numel, begin + room)
            parts.append(_Part(index, begin, end, offset))
            used = offset + (end - begin) * itemsize
            begin = end
    if parts:
        yield parts, used
