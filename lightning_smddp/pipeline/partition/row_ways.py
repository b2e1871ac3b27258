"""Objects that can be cut into rows by a method of their own.

Known by what they can do, not by their type:

* a packed sequence: its sequences are the rows;
* ``to_data_list()``, and a class with ``from_data_list()``: one row for each entry (graphs);
* a ``batch_size`` and items by slice: its first number is that of the rows (dicts of tensors with a batch size);
* ``iloc``: rows of a table;
* a length, and slices of the same type and of the length that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_smddp.pipeline.capture.objects import is_plain, names_within

Rows = slice | list[int]
_BUILT_IN = (Tensor, np.ndarray, list, tuple, dict, set, frozenset)


class UnclearBatchError(ValueError):
    """A batch cannot be cut: its rows are not clear, or something in it has no rows that are known here."""


@dataclass(frozen=True)
class RowWay:
    """How an object is cut.

    Attributes:
        rows: how many it has.
        take: some of them, as an object of the same kind.
        is_sure: they are rows for sure, not only the members of something with a length.
    """

    rows: int
    take: Callable[[Rows], Any]
    is_sure: bool = True


class Ways:
    """The ways of a batch's objects, each asked for once: it may take long."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, RowWay | None]] = {}  # objects are kept: no other one gets their identity

    def of(self, value: Any) -> RowWay | None:
        """How ``value`` can be cut, see :func:`way_of`; None if it cannot."""
        key = id(value)
        if key not in self._known:
            self._known[key] = value, way_of(value)
        _, way = self._known[key]
        return way


def way_of(value: Any) -> RowWay | None:
    """How ``value`` is cut into rows; None if it cannot be, or is a tensor or a plain container."""
    if isinstance(value, PackedSequence):
        num_sequences = int(value.batch_sizes[0])  # as many as have a first element
        return RowWay(num_sequences, lambda rows: _take_packed(value, rows))
    if isinstance(value, _BUILT_IN) or is_plain(value):
        return None
    kind = type(value)
    maker = _list_maker(kind)
    if maker is not None:
        return _way_of_list(value, maker)
    if hasattr(kind, "iloc"):
        return RowWay(len(value), lambda rows: value.iloc[rows])
    if not hasattr(kind, "__getitem__"):
        return None
    # What has a length need not have rows, and a slice of it may be of another kind: so it is tried out.
    count = _declared_rows(value)
    if count is None or not _slices_well(value, count):
        return None
    return RowWay(count, lambda rows: value[rows], is_sure=hasattr(value, "batch_size"))


def _list_maker(kind: type) -> Any:
    """The class, of ``kind`` and its bases, that can make a batch of a list of entries; None without any."""
    if not hasattr(kind, "to_data_list"):
        return None
    for base in kind.__mro__:
        if "from_data_list" in vars(base):
            return base
    return None


def _way_of_list(value: Any, maker: Any) -> RowWay:
    # Once for the whole batch, not for each micro-batch.
    entries = value.to_data_list()

    def take(rows: Rows) -> Any:
        part = maker.from_data_list(_of_list(entries, rows))
        # What the whole has beside its entries (a setting of the user's) would be missing in the micro-batches.
        lost = names_within(value) ^ names_within(part)
        if lost:
            raise UnclearBatchError(
                f"a batch made by {maker.__qualname__}.from_data_list() from some entries of {type(value).__qualname__}"
                f".to_data_list() has other attributes than the whole: {', '.join(sorted(lost))}"
            )
        return part

    return RowWay(len(entries), take)


def _declared_rows(value: Any) -> int | None:
    """What the object says of itself: the first of its batch size, or its length."""
    size = getattr(value, "batch_size", None)
    if isinstance(size, int):
        return size
    if isinstance(size, Sequence):
        if len(size) and isinstance(size[0], int):
            return size[0]
        return None
    if hasattr(type(value), "__len__"):
        return len(value)
    return None


def _slices_well(value: Any, count: int) -> bool:
    """Whether a slice of some rows is an object of the same type with so many rows."""
    if count < 1:
        return False
    fewer = count - 1
    try:
        part = value[:fewer]
    except Exception:  # whatever its method raises: it has no rows to slice
        return False
    return type(part) is type(value) and _declared_rows(part) == fewer


def _take_packed(packed: PackedSequence, rows: Rows) -> PackedSequence:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    some_lengths = lengths[rows]
    longest = int(some_lengths.max())
    # A sequence that was packed by falling lengths stays so in a slice; rows in another order have to be sorted.
    is_sorted = packed.sorted_indices is None and isinstance(rows, slice)
    return pack_padded_sequence(padded[rows, :longest], some_lengths, batch_first=True, enforce_sorted=is_sorted)


def _of_list(entries: Sequence[Any], rows: Rows) -> list[Any]:
    if isinstance(rows, slice):
        return list(entries[rows])
    return [entries[row] for row in rows]


def take_rows(value: Any, rows: Rows) -> Any:
    """Rows of a tensor, an array, a list or a tuple."""
    if isinstance(value, (list, tuple)):
        chosen = _of_list(value, rows)
        if isinstance(value, list):
            return chosen
        return type(value)(chosen)
    return value[rows]


def is_cuttable(value: Any) -> bool:
    """Whether a tensor's rows can be taken."""
    if not isinstance(value, Tensor):
        return True
    return value.layout is torch.strided and not value.is_nested
