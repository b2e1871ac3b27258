"""A batch of any structure in micro-batches: by the user's functions, else along the dimension of its rows.

What belongs to the rows of a batch of N rows:

* a tensor or array whose first dimension is N;
* a list or tuple of N entries, one per row: strings, numbers, tensors of any sizes, dicts. It is a collection of fields
  instead, each treated by itself, when some of the tensors in it have N rows and its entries are unlike each other, as
  in ``[images, labels]``;
* an object of length N whose slices are of its type and have the length that was asked for.

Mappings, dataclasses and named tuples are always fields. Everything else is given whole to every micro-batch.

N is the most common first dimension of the tensors outside of inner lists and tuples, or one that the loader's batches
have. Without such tensors it is the length that most lists agree on. A batch that is itself a list of alike dicts,
tuples or dataclasses has one row per entry. Where this leaves two readings, the batch is not cut: one micro-batch is
always right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_smddp.pipeline.capture.objects import attributes_of, describe, is_plain
from lightning_smddp.pipeline.partition.outputs import place_text
from lightning_smddp.wire.pytree import Path, leaves, members_of, with_members

SplitBatch: TypeAlias = Callable[[Any, int], Sequence[Any]]
_ARRAYS = (Tensor, np.ndarray)
_SHOWN = 8  # members of each container in messages


class UnclearBatchError(ValueError):
    """A batch cannot be cut: its rows are not clear, or something in it has no rows that are known here."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        value: as the batch, with fewer rows; its tensors are views of the batch's.
        size: its number of rows.
        weight: its share of the batch's rows: a mean over the batch is the sum of weighted means.
    """

    value: Any
    size: int
    weight: float


@dataclass(frozen=True)
class Splitter:
    """Cuts batches.

    Attributes:
        batch_size_fn: the user's number of rows of a batch.
        split_batch: the user's way to cut, from a batch and a number: a list of about so many batches, or of pairs of a
            batch and its number of rows.
        time_first: whether some module takes sequences with time first, so that a tensor's first dimension may be time.
    """

    batch_size_fn: Callable[[Any], int] | None = None
    split_batch: SplitBatch | None = None
    time_first: bool = False

    def rows(self, batch: Any, loader_sizes: Collection[int] = ()) -> int:
        """The number of rows of a batch of a loader whose batches have ``loader_sizes`` rows; empty if it does not say.

        Raises:
            UnclearBatchError: nobody says it, and it is not clear.
            ValueError: what ``batch_size_fn`` returns is no number of rows.
        """
        if self.split_batch is not None:
            return max([self.whole(batch).size, *loader_sizes])
        if self.batch_size_fn is not None:
            rows = self._told(self.batch_size_fn, batch)
            loader_sizes = [rows]
        else:
            rows = _find_rows(batch, loader_sizes)
        arrays = list(_outer_arrays(batch))
        if any(self._may_have_time_first(array, arrays, rows, loader_sizes) for array in arrays):
            raise UnclearBatchError(f"the first dimension ({rows}) may be that of time: {sizes_text(batch)}")
        return rows

    def cut(self, batch: Any, count: int, rows: int) -> list[MicroBatch]:
        """Cut ``batch`` of ``rows`` into ``count`` micro-batches, or fewer; bigger ones by one row come first.

        Raises:
            UnclearBatchError: something in it cannot be cut, or can be read in two ways.
            ValueError: what ``split_batch`` returns is wrong.
        """
        if self.split_batch is not None and count == 1:
            return [self.whole(batch)]
        if self.split_batch is not None:
            return self._by_hook(self.split_batch, batch, count, rows)
        return split(batch, count, rows, is_told=self.batch_size_fn is not None)

    def whole(self, batch: Any) -> MicroBatch:
        """All of a batch as one micro-batch."""
        rows = rows_of(batch)
        if self.batch_size_fn is not None:
            rows = self._told(self.batch_size_fn, batch)
        return MicroBatch(batch, max(1, rows), 1.0)

    def _may_have_time_first(self, array: Any, arrays: list[Any], rows: int, loader_sizes: Collection[int]) -> bool:
        if array.ndim < 2:
            return False
        first, second = array.shape[:2]
        if self.time_first and (first == second == rows or not loader_sizes):
            return True
        # A last batch may have another size than the loader says; what has rows alone shows which dimension these are.
        is_unlikely = bool(loader_sizes) and rows not in loader_sizes and second in loader_sizes
        return (second == rows != first) or (is_unlikely and all(other.ndim > 1 for other in arrays))

    @staticmethod
    def _told(batch_size_fn: Callable[[Any], int], batch: Any) -> int:
        size = batch_size_fn(batch)
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"batch_size_fn returned {size!r} for a batch. It has to return its number of rows.")
        return size

    def _by_hook(self, hook: SplitBatch, batch: Any, count: int, rows: int) -> list[MicroBatch]:
        parts = list(hook(batch, count))
        if not parts:
            raise ValueError(f"split_batch returned no batches for num_microbatches={count}. Return one at least.")
        if all(map(_is_pair, parts)):
            values, sizes = map(list, zip(*parts, strict=True))
        else:
            values, sizes = parts, [self.whole(part).size for part in parts]
            expected = self.whole(batch).size
            if sum(sizes) != expected:
                raise ValueError(
                    f"split_batch returned batches that seem to have {sizes} rows, of {expected} in all: their weights "
                    "in the loss are not clear. Return pairs of a batch and its number of rows instead of batches."
                )
        if min(sizes) < 1:
            raise ValueError(f"split_batch returned batches of {sizes} rows. Each has to have one at least.")
        total = sum(sizes)
        return [MicroBatch(value, size, size / total) for value, size in zip(values, sizes, strict=True)]


def _is_pair(part: Any) -> bool:
    """Whether it is a batch with its number of rows, and no batch: a pair of tensors has no int."""
    return type(part) is tuple and len(part) == 2 and type(part[1]) is int


def has_time_first(root: nn.Module) -> bool:
    """Whether some module takes sequences with time first, by the attribute that torch's modules have for it."""
    return any(getattr(module, "batch_first", None) is False for module in root.modules())


def rows_of(batch: Any) -> int:
    """The number of rows that a batch seems to have."""
    votes = _votes(batch)
    if not votes:
        return 1
    (rows, _), *_ = votes.most_common(1)
    return max(1, rows)


def split(batch: Any, count: int, rows: int | None = None, is_told: bool = False) -> list[MicroBatch]:
    """Cut ``batch`` of ``rows`` into ``count`` micro-batches, or one for each row if there are fewer.

    Args:
        batch: any nesting of mappings, sequences and dataclasses.
        count: how many.
        rows: of the batch; None: as many as it seems to have.
        is_told: the user has said ``rows``, so a list of that length has one entry for each row.

    Raises:
        UnclearBatchError: something in it cannot be cut, or can be read in two ways; with its path and the cure.
    """
    if count < 1:
        raise ValueError(f"num_microbatches={count} must be at least 1")
    if rows is None:
        rows = _find_rows(batch, ())
    paths = frozenset(_row_paths(batch, rows, is_told))
    number = min(count, rows)
    if is_told and not paths:
        raise UnclearBatchError(f"{rows} rows were told, but nothing in the batch has as many: {sizes_text(batch)}")
    if number <= 1 or not paths:
        return [MicroBatch(batch, max(1, rows), 1.0)]
    smaller, bigger = divmod(rows, number)  # 8 rows in 3 parts are 3, 3 and 2
    parts = []
    start = 0
    for index in range(number):
        size = smaller + (index < bigger)
        part = _take(batch, slice(start, start + size), paths)
        parts.append(MicroBatch(part, size, size / rows))
        start += size
    return parts


def signature(microbatch: Any) -> str:
    """What a micro-batch (or any value) consists of: structure, shapes, dtypes, ``requires_grad``, but no values.

    Equal signatures mean that stages exchange tensors of equal shapes, as far as shapes do not depend on values.
    """
    value = microbatch
    if isinstance(microbatch, MicroBatch):
        value = microbatch.value
    if isinstance(value, Tensor):
        if value.requires_grad:
            return f"{describe(value)}, grad"
        return describe(value)
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}"
    children = members_of(value)
    if children is not None:
        texts = [f"{key}={signature(child)}" for key, child in children]
        return f"{type(value).__name__}({', '.join(texts)})"
    if is_plain(value):
        return type(value).__name__
    return describe(value)


# ---- how many rows ---------------------------------------------------------------------------------------------------


def _find_rows(batch: Any, loader_sizes: Collection[int]) -> int:
    """The most common number of rows; of equally common ones that of the loader."""
    votes = _votes(batch)
    if not votes:
        return 1
    most = max(votes.values())
    likely = [rows for rows, count in votes.items() if count == most]
    of_loader = [rows for rows in loader_sizes if rows in votes]
    if len(likely) > 1 and not of_loader:
        raise UnclearBatchError(
            f"the batch may have {likely[0]} or {likely[1]} rows: {sizes_text(batch)}; "
            "say which with PartitionOptions(batch_size_fn=...), a function of the batch"
        )
    return likely[0] if len(likely) == 1 else of_loader[0]


def _votes(batch: Any) -> Counter[int]:
    """How often each number of rows is found."""
    if _is_sequence(batch) and _is_list_of_samples(batch):
        return Counter([len(batch)])
    votes = Counter(_length(array) for array in _outer_arrays(batch))
    return votes or Counter(_lengths(batch))


def _outer_arrays(value: Any, outermost: bool = True) -> Iterator[Any]:
    """Tensors and arrays that are in no list or tuple, but an outermost one that holds fields."""
    if isinstance(value, _ARRAYS):
        if _can_be_cut(value) and value.ndim:
            yield value
    elif (outermost or not _is_sequence(value)) and not isinstance(value, PackedSequence):
        if outermost and _is_sequence(value) and _is_list_of_samples(value):
            return
        for _, child in members_of(value) or []:
            yield from _outer_arrays(child, outermost=False)


def _lengths(value: Any, outermost: bool = True) -> Iterator[int]:
    """What lists and objects that are in no other list may have as rows: their entries, or the rows of their fields."""
    is_list = _is_sequence(value)
    if is_list and not (outermost and any(members_of(entry) for entry in value)):
        found = {_length(array) for array in _arrays_in(value)}
        if len(found) != 1:
            found = {len(value)}
        elif _are_alike(value):
            found.add(len(value))
        yield from found
        return
    length = None if is_list else _sliced_length(value)
    if length is not None:
        yield length
    for _, child in members_of(value) or []:
        yield from _lengths(child, outermost=False)


def _is_list_of_samples(value: Sequence[Any]) -> bool:
    """Whether a whole batch is a list of samples as the dataset returned them: alike, and not fields of one size."""
    if len(value) < 2 or not _are_alike(value) or any(members_of(entry) is None for entry in value):
        return False
    # Alike containers that hold nothing but tensors of one length may as well be a few batches of that many rows.
    arrays = _arrays_in(value)
    return len({_length(array) for array in arrays}) != 1 or len(arrays) != len(leaves(value))


# ---- cutting ---------------------------------------------------------------------------------------------------------


def _row_paths(value: Any, rows: int, is_told: bool, path: Path = ()) -> Iterator[Path]:
    """Where in a batch its rows are. Raises ``UnclearBatchError`` for what can be read in two ways, or not at all."""
    if isinstance(value, _ARRAYS) and _can_be_cut(value):
        if value.ndim and _length(value) == rows:
            yield path
        return
    if _is_sequence(value) and len(value) == rows:
        # As many entries as rows. If some of the tensors in them have as many rows, too, as in a list of 4 tensors of
        # shape (4, 3), the entries may be fields all the same.
        arrays = _arrays_in(value)
        fitting = [array for array in arrays if _length(array) == rows]
        if not fitting or _are_alike(value):
            if len(fitting) == len(arrays) > 0 and not is_told and rows > 1:
                where = place_text(path)
                raise UnclearBatchError(f"{where} may have an entry for each row, or be {rows} fields")
            yield path
            return
    children = members_of(value)
    if _sliced_length(value) == rows:
        yield path
    elif children is not None and not isinstance(value, PackedSequence):
        for key, child in children:
            yield from _row_paths(child, rows, is_told, (*path, key))
    elif _is_opaque(value):
        kind = type(value)
        raise UnclearBatchError(
            f"{place_text(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be cut into "
            "micro-batches; give the module a method `split_batch(batch, num_microbatches)` that returns a list of "
            "batches, or use num_microbatches=1"
        )


def _take(value: Any, rows: slice, paths: frozenset[Path], path: Path = ()) -> Any:
    """Some rows of what is at ``paths``; all of the rest, the very object for all micro-batches."""
    if path in paths:
        return value[rows]
    children = members_of(value)
    depth = len(path)
    if children is None or not any(inner[:depth] == path for inner in paths):
        return value
    return with_members(value, [(key, _take(child, rows, paths, (*path, key))) for key, child in children])


def _can_be_cut(array: Any) -> bool:
    return not isinstance(array, Tensor) or (array.layout is torch.strided and not array.is_nested)


def _sliced_length(value: Any) -> int | None:
    """The length of an object whose slices are of its type, and of the length that was asked for; None for others."""
    if isinstance(value, (*_ARRAYS, list, tuple, str, bytes)) or type(value) is dict:
        return None
    if not (hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")):
        return None
    fewer = len(value) - 1
    try:
        part = value[:fewer]
    except Exception:  # whatever its method raises: it has no rows to slice
        return None
    return fewer + 1 if fewer >= 0 and type(part) is type(value) and len(part) == fewer else None


def _is_opaque(value: Any) -> bool:
    """Whether there may be rows in ``value``, which is no container, that nobody knows how to take."""
    if is_plain(value):
        return False
    if isinstance(value, Tensor) or (hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")):
        return True
    held = leaves(list(attributes_of(value).values()))
    return any(isinstance(leaf, _ARRAYS) for leaf in held)


# ---- structure -------------------------------------------------------------------------------------------------------


def _is_sequence(value: Any) -> bool:
    """Whether ``value`` is a list or tuple whose positions have no names."""
    return isinstance(value, (list, tuple)) and not isinstance(value, torch.Size) and not hasattr(value, "_fields")


def _arrays_in(value: Any) -> list[Any]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, _ARRAYS) and (not _can_be_cut(leaf) or leaf.ndim)]


def _length(array: Any) -> int:
    return int(array.size(0)) if isinstance(array, Tensor) else len(array)


def _are_alike(sequence: Sequence[Any]) -> bool:
    """Whether all entries could be samples of one dataset: the same structure, dtypes and numbers of dimensions."""
    return len({_kind(entry) for entry in sequence}) <= 1


def _kind(value: Any) -> Any:
    """What a sample and those beside it have in common; can be hashed. Sizes are left out, samples differ in them."""
    if isinstance(value, _ARRAYS):
        return type(value), value.dtype, value.ndim
    children = members_of(value)
    if children is None or isinstance(value, list):  # lists within samples are of any length
        return type(value)
    return type(value), tuple((key, _kind(child)) for key, child in children)


def sizes_text(value: Any, path: Path = ()) -> str:
    """Where the batch's tensors and lists are, and how many rows each could have."""
    where = place_text(path)
    if isinstance(value, _ARRAYS):
        return f"{where} has shape {list(value.shape)}" if _can_be_cut(value) else ""
    texts = [f"{where} has {len(value)} entries"] if _is_sequence(value) else []
    for key, child in (members_of(value) or [])[:_SHOWN]:
        text = sizes_text(child, (*path, key))
        if text:
            texts.append(text)
    return ", ".join(texts)
