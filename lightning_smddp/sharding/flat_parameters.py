"""Parameters in a row, cut into shares of which each rank steps one, and how its step comes to all.

CPU ranks of a node have the row in memory that they share, and write what they have stepped into each other's. Other
ranks leave parameters where they are, and broadcast by the backend.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.node_mesh import NodeMesh
from lightning_smddp.communication.shared_segments import create_file
from lightning_smddp.communication.tensors import broadcast_tensors
from lightning_smddp.wording import counted

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector of a CPU


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the row: elements [start, stop)."""

    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        """One behind its last element, in the row of all parameters."""
        return self.start + self.parameter.numel()


Piece = tuple[Slot, int, int]
"""Elements [low, high) of a parameter, counted in the order in which they lie in memory."""


@dataclass(frozen=True)
class FlatLayout:
    """Parameters of one type and device in a row, with gaps for alignment.

    Attributes:
        bounds: ``shares + 1`` ascending positions: share *i* is [bounds[i], bounds[i + 1]).
    """

    slots: tuple[Slot, ...]
    bounds: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The one that all parameters of this layout have."""
        return self.slots[0].parameter.dtype

    def pieces_of_share(self, share: int) -> Iterator[Piece]:
        """What of the parameters lies in a share."""
        # Positions are those in the row; a piece counts from the begin of its parameter.
        for slot in self.slots:
            low = max(self.bounds[share], slot.start)
            high = min(self.bounds[share + 1], slot.stop)
            if low < high:
                yield slot, low - slot.start, high - slot.start


def lay_out(parameters: Iterable[nn.Parameter], shares: int, splits: bool) -> list[FlatLayout]:
    """A layout for each type, device and ``requires_grad``.

    Frozen parameters have shares of their own: a model that is mostly frozen is still cut evenly where it is trained.

    Args:
        parameters: that :func:`movable` says can be laid in a row.
        shares: how many.
        splits: shares are equal, and may begin within a parameter; else each has whole parameters, and they are
            balanced by size.
    """
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, parameter.requires_grad)
        kinds.setdefault(kind, []).append(parameter)
    layouts = []
    for (dtype, *_), members in kinds.items():
        slots: list[Slot] = []
        bounds = [0]
        for part in [members] if splits else _balanced(members, shares):
            end = bounds[-1]
            for parameter in part:
                slots.append(Slot(parameter, end))
                end = _aligned(slots[-1].stop, dtype)
            bounds.append(end)
        if splits:
            # Whole cache lines, so that no two ranks write to the same one. So the last shares may be short, or empty.
            width = _aligned(math.ceil(bounds[-1] / shares), dtype)
            bounds = [index * width for index in range(shares + 1)]
        layouts.append(FlatLayout(tuple(slots), tuple(bounds)))
    return layouts


def movable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those whose values can be moved to other memory: dense ones of their own memory.

    Views of one memory, subclasses of tensors, sparse ones, single numbers and empty ones stay, and are stepped by each
    rank.
    """
    # Views of one memory stay there: moved by itself, a parameter would no longer change with the others.
    plain = [parameter for parameter in parameters if _is_plain(parameter)]
    users = Counter(parameter.untyped_storage().data_ptr() for parameter in plain)
    return [parameter for parameter in plain if users[parameter.untyped_storage().data_ptr()] == 1]


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``, of the shape of ``like``, as one dimension in the order in which ``like`` lies in memory.

    A view where ``tensor`` lies in memory so too, as gradients do; else a copy.
    """
    # Dense and without overlap, whatever the order of its dimensions: its memory is one row of all elements, which
    # `as_strided` shows without a copy.
    if tensor.stride() != like.stride():
        copy = torch.empty_strided(like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = copy.copy_(tensor.to_dense())  # a sparse gradient, say
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_plain(parameter: nn.Parameter) -> bool:
    if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided:
        return False
    has_elements = parameter.ndim > 0 and parameter.numel() > 0
    return has_elements and bool(torch.ops.aten.is_non_overlapping_and_dense.default(parameter))


def _aligned(position: int, dtype: torch.dtype) -> int:
    """The next position, in elements, at which a cache line begins."""
    step = _ALIGNMENT // dtype.itemsize
    return math.ceil(position / step) * step


def _balanced(members: Sequence[nn.Parameter], shares: int) -> list[list[nn.Parameter]]:
    """The members of each share: the largest first, each to the share that has least so far."""
    loads = [0] * shares  # elements of each share
    chosen: list[list[nn.Parameter]] = [[] for _ in range(shares)]
    for member in sorted(members, key=nn.Parameter.numel, reverse=True):
        share = loads.index(min(loads))
        loads[share] += member.numel()
        chosen[share].append(member)
    return chosen


class FlatParameters:
    """The parameters of some layouts. Creation is collective over the node.

    Args:
        layouts: all of them.
        share: the one that this rank steps; None if it steps none, as its node has more ranks than another one.
        group: the ranks, of neighbouring shares in their order, that exchange these by the backend; None if nobody.
        mesh: of the node's ranks, to share memory; None leaves parameters where they are.

    Raises:
        MemoryError: there is no memory to share; on all ranks of the node.
    """

    def __init__(
        self,
        layouts: list[FlatLayout],
        share: int | None,
        group: dist.ProcessGroup | None = None,
        mesh: NodeMesh | None = None,
    ) -> None:
        self.layouts = layouts
        self.share = share
        self._group = group
        self._mesh = mesh
        self._rows: list[Tensor] = []  # this rank's memory of each layout
        self._others: list[list[Tensor]] = []  # that of the node's other ranks
        self._homes: dict[nn.Parameter, Tensor] = {}  # the parameters' places, where a step writes
        for layout in layouts:
            self._homes |= {slot.parameter: slot.parameter.detach() for slot in layout.slots}
            if mesh is not None:
                self._move(layout, mesh)

    def _move(self, layout: FlatLayout, mesh: NodeMesh) -> None:
        own, *others = self._map(layout, mesh)
        self._rows.append(torch.frombuffer(own, dtype=layout.dtype))
        self._others.append([torch.frombuffer(other, dtype=layout.dtype) for other in others])
        for slot in layout.slots:
            # Of the row's memory, but with a storage of just its size: who saves a parameter saves no others.
            parameter = slot.parameter
            offset = slot.start * layout.dtype.itemsize
            flat = torch.frombuffer(own, dtype=layout.dtype, count=parameter.numel(), offset=offset)
            home = flat.as_strided(parameter.size(), parameter.stride())
            parameter.data = home.copy_(parameter.detach())
            self._homes[parameter] = home

    def _map(self, layout: FlatLayout, mesh: NodeMesh) -> list[mmap.mmap]:
        """Memory of all ranks of the node, this one's first."""
        # Files have no name: their descriptors go to the other ranks through the mesh's sockets. Behind the mappings
        # nobody needs them, and the memory is gone with the last mapping.
        size = layout.bounds[-1] * layout.dtype.itemsize
        descriptors: list[int] = []
        with contextlib.suppress(OSError):  # no memory: the others learn of it by getting no descriptor
            descriptors.append(create_file(size))
        descriptors += mesh.exchange(descriptor=next(iter(descriptors), None)).descriptors.values()
        try:
            if len(descriptors) < mesh.size:
                raise MemoryError(
                    f"No {counted(size, 'byte')} of memory that ranks can share are left on "
                    f"{mesh.name}'s node for the parameters. Give the job more memory, or use "
                    "strategy='smddp_fsdp', which divides the parameters, too."
                )
            return [mmap.mmap(descriptor, size) for descriptor in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def values(self, layout: int, slot: Slot, low: int, high: int) -> Tensor:
        """The memory that a step writes for a piece of this rank's share, as one dimension."""
        if self._mesh is not None:
            return self._rows[layout][slot.start + low : slot.start + high]
        parameter = slot.parameter.detach()
        return in_memory_order(parameter, parameter)[low:high]

    def begin_step(self) -> None:
        """Before a step: parameters that were given other memory (``parameter.data = ...``) keep its values alone.

        Raises:
            ValueError: their shape or type is another one now.
        """
        for parameter, home in self._homes.items():
            if parameter.data_ptr() == home.data_ptr():
                continue
            if parameter.shape != home.shape or parameter.dtype != home.dtype:
                raise ValueError(
                    f"A parameter of shape {tuple(home.shape)} ({home.dtype}) was given {tuple(parameter.shape)} "
                    f"({parameter.dtype}) as its `data`: with shard='optimizer' both stay as they are."
                )
            parameter.data = home.copy_(parameter.detach())

    def end_step(self) -> None:
        """After a step: all ranks have all shares when it returns. Collective."""
        trained = [number for number, layout in enumerate(self.layouts) if _is_trained(layout)]
        parts = [(number, *part) for number in trained for part in enumerate(self._own_shares())]
        if self._group is not None:
            for number, source, share in parts:
                values = [self.values(number, *piece) for piece in self.layouts[number].pieces_of_share(share)]
                broadcast_tensors(values, self._group, source, self.layouts[number].slots[0].parameter.device)
        if self._mesh is not None:
            self._mesh.exchange()  # all have stepped, so nobody's code uses parameters now
            for number, _, share in parts:
                low, high = self.layouts[number].bounds[share : share + 2]
                for other in self._others[number]:
                    other[low:high].copy_(self._rows[number][low:high])
            self._mesh.exchange()

    def _own_shares(self) -> range:
        """This rank's share, and those that it gets by the backend."""
        if self.share is None:
            return range(0)
        if self._group is None:
            return range(self.share, self.share + 1)
        first = self.share - self._group.rank()
        return range(first, first + self._group.size())

    def close(self) -> None:
        """Give the parameters memory of their own. Not collective."""
        if self._mesh is not None:
            for parameter in self._homes:
                parameter.data = parameter.detach().clone()
        self._homes.clear()
        self._rows, self._others = [], []


def _is_trained(layout: FlatLayout) -> bool:
    # What was frozen behind its backward pass is stepped, too.
    parameters = [slot.parameter for slot in layout.slots]
    return any(parameter.requires_grad or parameter.grad is not None for parameter in parameters)
