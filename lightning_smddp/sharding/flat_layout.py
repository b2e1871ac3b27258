"""Which elements of which parameters each rank steps: parameters in a row, cut into shares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Named = tuple[str, nn.Parameter]

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector of a CPU


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the row: elements [start, stop)."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        """One behind its last element, in the row of all parameters."""
        return self.start + self.parameter.numel()


@dataclass(frozen=True)
class Piece:
    """Elements [low, high) of a parameter, counted in the order in which they lie in memory."""

    slot: Slot
    low: int
    high: int


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

    @property
    def device(self) -> torch.device:
        """The one that all parameters of this layout have."""
        return self.slots[0].parameter.device

    @property
    def numel(self) -> int:
        """Elements of the row, gaps included."""
        return self.bounds[-1]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What of the parameters lies in [start, stop)."""
        # Positions are those in the row; a piece counts from the begin of its parameter.
        for slot in self.slots:
            low = max(start, slot.start)
            high = min(stop, slot.stop)
            if low < high:
                yield Piece(slot, low - slot.start, high - slot.start)

    def pieces_of_share(self, share: int) -> Iterator[Piece]:
        """What of the parameters lies in a share."""
        return self.pieces(self.bounds[share], self.bounds[share + 1])


def lay_out(named: Sequence[Named], shares: int, splits: bool) -> list[FlatLayout]:
    """A layout for each type, device and ``requires_grad``.

    Frozen parameters have shares of their own: a model that is mostly frozen is still cut evenly where it is trained.

    Args:
        named: parameters that :func:`movable` says can be laid in a row.
        shares: how many.
        splits: shares are equal, and may begin within a parameter; else each has whole parameters, and they are
            balanced by size.
    """
    kinds: dict[Any, list[Named]] = {}
    for name, parameter in named:
        kind = (parameter.dtype, parameter.device, parameter.requires_grad)
        kinds.setdefault(kind, []).append((name, parameter))
    layouts = []
    for members in kinds.values():
        if splits:
            layouts.append(_equal_shares(members, shares))
        else:
            layouts.append(_whole_parameters(members, shares))
    return layouts


def movable(named: Sequence[Named]) -> tuple[list[Named], list[str]]:
    """The parameters whose values can be moved to other memory, and the names of those that stay where they are.

    Moved are dense ones of their own memory. Views of one memory, subclasses of tensors, sparse ones, single numbers
    and empty ones stay, and are stepped by each rank.
    """
    users: Counter[int] = Counter()  # of each memory, by its address
    for _, parameter in named:
        if _is_plain(parameter):
            users[parameter.untyped_storage().data_ptr()] += 1
    moved = []
    staying = []
    for name, parameter in named:
        # Views of one memory stay there: moved by itself, a parameter would no longer change with the others.
        if _is_plain(parameter) and users[parameter.untyped_storage().data_ptr()] == 1:
            moved.append((name, parameter))
        else:
            staying.append(name)
    return moved, staying


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``, of the shape of ``like``, as one dimension in the order in which ``like`` lies in memory.

    A view where ``tensor`` lies in memory so too, as gradients do; else a copy.
    """
    # Dense and without overlap, whatever the order of its dimensions: its memory is one row of all elements, which
    # `as_strided` shows without a copy.
    if tensor.stride() != like.stride():
        copy = torch.empty_strided(like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = copy.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_plain(parameter: nn.Parameter) -> bool:
    if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided:
        return False
    if parameter.ndim == 0 or parameter.numel() == 0:
        return False
    is_dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(parameter)
    return is_dense


def _aligned(position: int, dtype: torch.dtype) -> int:
    """The next position, in elements, at which a cache line begins."""
    step = _ALIGNMENT // dtype.itemsize
    return math.ceil(position / step) * step


def _equal_shares(members: Sequence[Named], shares: int) -> FlatLayout:
    slots: list[Slot] = []
    end = _append(slots, members, 0)
    # Whole cache lines, so that no two ranks write to the same one. So the last shares may be short, or empty.
    dtype = slots[0].parameter.dtype
    width = _aligned(math.ceil(end / shares), dtype)
    bounds = [index * width for index in range(shares + 1)]
    return FlatLayout(tuple(slots), tuple(bounds))


def _whole_parameters(members: Sequence[Named], shares: int) -> FlatLayout:
    """The largest parameter first, each to the share that has least so far."""
    by_size = sorted(members, key=lambda member: -member[1].numel())
    loads = [0] * shares  # elements of each share
    chosen: list[list[Named]] = [[] for _ in range(shares)]
    for name, parameter in by_size:
        share = loads.index(min(loads))
        loads[share] += parameter.numel()
        chosen[share].append((name, parameter))
    slots: list[Slot] = []
    bounds = [0]
    for part in chosen:
        bounds.append(_append(slots, part, bounds[-1]))
    return FlatLayout(tuple(slots), tuple(bounds))


def _append(slots: list[Slot], members: Iterable[Named], end: int) -> int:
    """Put ``members`` behind the ``slots``, which end at position ``end``; returns where they end now."""
    for name, parameter in members:
        slot = Slot(name, parameter, end)
        slots.append(slot)
        end = _aligned(slot.stop, parameter.dtype)
    return end
