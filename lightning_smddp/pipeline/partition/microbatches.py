"""A batch of any structure in micro-batches, and what a step returned for each of them as one value again.

A batch is cut by the user's functions, else along the dimension of its rows. What belongs to the rows of a batch of N:

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
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_smddp.pipeline.capture.objects import attributes_of, describe, is_plain
from lightning_smddp.wire.pytree import Path, items, leaves, members_of, tensors, with_members

SplitBatch: TypeAlias = Callable[[Any, int], Sequence[Any]]
_ARRAYS = (Tensor, np.ndarray)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHOWN = 16  # tensors of a batch in messages


class UnclearBatchError(ValueError):
    """A batch cannot be cut: its rows are not clear, or something in it has no rows that are known here."""


class UncombinableError(ValueError):
    """There is no rule that makes one value of those of micro-batches."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        value: as the batch, with fewer rows; its tensors are views of the batch's.
        size: its number of rows.
        weight: how much it counts in the batch's loss and means: shares of rows or labels, which sum to 1; or 1.0 for
            each of several where losses are added (``_adds_losses`` of ``step_record.py`` looks for that).
    """

    value: Any
    size: int
    weight: float


MicroBatches: TypeAlias = Sequence[MicroBatch]
"""Of one batch, in order."""


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
        rows = self._given_rows(batch)
        if rows is None:
            rows = _find_rows(batch, loader_sizes)
        else:
            loader_sizes = [rows]
        arrays = [carrier for carrier in _carriers(batch) if isinstance(carrier, _ARRAYS)]
        # A last batch may have another size than the loader says; what has rows alone shows which dimension these are.
        has_rows_alone = any(array.ndim == 1 for array in arrays)
        expected = (rows,) if has_rows_alone else loader_sizes
        if any(self._may_have_time_first(array, rows, loader_sizes, expected) for array in arrays):
            raise UnclearBatchError(f"the first dimension ({rows}) may be that of time: {_sizes_text(batch)}")
        return rows

    def cut(self, batch: Any, count: int, rows: int) -> list[MicroBatch]:
        """Cut ``batch`` of ``rows`` into ``count`` micro-batches, or fewer; bigger ones by one row come first.

        Raises:
            UnclearBatchError: something in it cannot be cut, or can be read in two ways.
            ValueError: what ``split_batch`` returns is wrong.
        """
        if self.split_batch is None:
            return split(batch, count, rows, is_given=self.batch_size_fn is not None)
        if count == 1:
            return [self.whole(batch)]
        parts = list(self.split_batch(batch, count))
        if not all(type(part) is tuple and len(part) == 2 and type(part[1]) is int for part in parts):
            parts = [(part, self.whole(part).size) for part in parts]
            sizes, expected = [size for _, size in parts], self.whole(batch).size
            if parts and sum(sizes) != expected:
                raise ValueError(
                    f"split_batch returned batches that seem to have {sizes} rows, of {expected} in all: their weights "
                    "in the loss are not clear. Return pairs of a batch and its number of rows instead of batches."
                )
        sizes = [size for _, size in parts]
        if min(sizes, default=0) < 1:
            raise ValueError(
                f"split_batch returned batches of {sizes} rows for num_microbatches={count}. Return one batch at "
                "least, and in each one row at least."
            )
        return [MicroBatch(value, size, size / sum(sizes)) for value, size in parts]

    def whole(self, batch: Any) -> MicroBatch:
        """All of a batch as one micro-batch."""
        rows = self._given_rows(batch)
        return MicroBatch(batch, max(1, rows_of(batch) if rows is None else rows), 1.0)

    def _may_have_time_first(
        self, array: Any, rows: int, loader_sizes: Collection[int], expected: Collection[int]
    ) -> bool:
        if array.ndim < 2:
            return False
        first, second = array.shape[:2]
        if self.time_first and (first == second == rows or not loader_sizes):
            return True
        return second != first and (second == rows or (rows not in expected and second in expected))

    def _given_rows(self, batch: Any) -> int | None:
        if self.batch_size_fn is None:
            return None
        size = self.batch_size_fn(batch)
        if type(size) is not int or size < 0:
            raise ValueError(f"batch_size_fn returned {size!r} for a batch. It has to return its number of rows.")
        return size


def has_time_first(root: nn.Module) -> bool:
    """Whether some module takes sequences with time first, by the attribute that torch's modules have for it."""
    return any(getattr(module, "batch_first", None) is False for module in root.modules())


def looks_at_other_rows(module: nn.Module) -> list[str]:
    """Names of layers that normalise over the rows they are given."""
    return [name for name, part in module.named_modules() if isinstance(part, _BATCH_NORMS) and part.training]


def split(batch: Any, count: int, rows: int | None = None, is_given: bool = False) -> list[MicroBatch]:
    """Cut ``batch`` of ``rows`` into ``count`` micro-batches, or one for each row if there are fewer.

    Args:
        batch: any nesting of mappings, sequences and dataclasses.
        count: how many.
        rows: of the batch; None: as many as it seems to have.
        is_given: the user has said ``rows``, so a list of that length has one entry for each row.

    Raises:
        UnclearBatchError: something in it cannot be cut, or can be read in two ways; with its path and the cure.
    """
    if count < 1:
        raise ValueError(f"num_microbatches={count} must be at least 1")
    if rows is None:
        rows = _find_rows(batch, ())
    paths = frozenset(_row_paths(batch, rows, is_given))
    if is_given and not paths:
        raise UnclearBatchError(f"{rows} rows were given, but nothing in the batch has as many: {_sizes_text(batch)}")
    number = min(count, rows)
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
    value = microbatch.value if isinstance(microbatch, MicroBatch) else microbatch
    if isinstance(value, Tensor) and value.requires_grad:
        return f"{describe(value)}, grad"
    children = members_of(value)
    if children is not None:
        texts = [f"{key}={signature(child)}" for key, child in children]
        return f"{type(value).__name__}({', '.join(texts)})"
    return type(value).__name__ if is_plain(value) else describe(value)


# ---- how many rows ---------------------------------------------------------------------------------------------------


def rows_of(batch: Any) -> int:
    """The number of rows that a batch seems to have, at least 1."""
    votes = _votes(batch)
    return max(1, max(votes, key=votes.__getitem__, default=1))


def _find_rows(batch: Any, loader_sizes: Collection[int]) -> int:
    """The most common number of rows; of equally common ones that of the loader."""
    votes = _votes(batch)
    most = max(votes.values(), default=0)
    likely = [rows for rows, count in votes.items() if count == most]
    if len(likely) < 2:
        return likely[0] if likely else 1
    for size in loader_sizes:
        if size in votes:
            return size
    raise UnclearBatchError(
        f"the batch may have {likely[0]} or {likely[1]} rows: {_sizes_text(batch)}; "
        "say which with PartitionOptions(batch_size_fn=...), a function of the batch"
    )


def _votes(batch: Any) -> Counter[int]:
    """How often each number of rows is found: by tensors, else by lists and other objects."""
    carriers = list(_carriers(batch))
    arrays = [_length(carrier) for carrier in carriers if isinstance(carrier, _ARRAYS)]
    return Counter(arrays or [rows for carrier in carriers for rows in _readings(carrier)])


def _carriers(value: Any, outermost: bool = True) -> Iterator[Any]:
    """What may have rows: tensors and arrays, lists that are in no other list, and objects with slices."""
    if isinstance(value, _ARRAYS):
        if _can_be_cut(value) and value.ndim:
            yield value
        return
    is_list = _is_sequence(value) and not (outermost and _is_list_of_fields(value))
    if is_list or _sliced_length(value) is not None:
        yield value
    elif not isinstance(value, PackedSequence):
        for _, child in members_of(value) or ():
            yield from _carriers(child, outermost=False)


def _is_list_of_fields(values: Sequence[Any]) -> bool:
    """Whether a whole batch holds fields, and neither samples as the dataset returned them nor strings and numbers."""
    containers = [members_of(entry) is not None for entry in values]
    if len(values) > 1 and all(containers) and _are_alike(values) and _readings(values) == {len(values)}:
        return False
    return any(containers) or any(isinstance(entry, _ARRAYS) for entry in values)


def _readings(value: Any) -> set[int]:
    """The numbers of rows that a list or an object may stand for: its entries, or the rows of fields in it."""
    arrays = _arrays_in(value)
    sizes = {_length(array) for array in arrays}
    if not _is_sequence(value) or len(sizes) != 1:
        return {len(value)}
    if not _are_alike(value):
        return sizes
    # Alike entries that hold nothing but tensors of one length may as well be a few batches of that many rows.
    return sizes | {len(value)} if len(arrays) == len(leaves(value)) else {len(value)}


# ---- cutting ---------------------------------------------------------------------------------------------------------


def _row_paths(value: Any, rows: int, is_given: bool, path: Path = ()) -> Iterator[Path]:
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
            if len(fitting) == len(arrays) > 0 and not is_given and rows > 1:
                where = place_text(path)
                raise UnclearBatchError(f"{where} may have an entry for each row, or be {rows} fields")
            yield path
            return
    children = members_of(value)
    if _sliced_length(value) == rows:
        yield path
    elif children is not None and not isinstance(value, PackedSequence):
        for key, child in children:
            yield from _row_paths(child, rows, is_given, (*path, key))
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
    if children is None or not any(inner[: len(path)] == path for inner in paths):
        return value
    return with_members(value, [(key, _take(child, rows, paths, (*path, key))) for key, child in children])


def _can_be_cut(array: Any) -> bool:
    return not isinstance(array, Tensor) or (array.layout is torch.strided and not array.is_nested)


def _sliced_length(value: Any) -> int | None:
    """The length of an object whose slices are of its type, and of the length that was asked for; None for others."""
    if isinstance(value, (*_ARRAYS, list, tuple, dict, str, bytes)) or not _has_items(value):
        return None
    length = len(value)
    try:
        part = value[: length - 1]
    except Exception:  # whatever its method raises: it has no rows to slice
        return None
    return length if length and type(part) is type(value) and len(part) == length - 1 else None


def _has_items(value: Any) -> bool:
    return hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")


def _is_opaque(value: Any) -> bool:
    """Whether there may be rows in ``value``, which is no container, that nobody knows how to take."""
    if is_plain(value):
        return False
    held = leaves(list(attributes_of(value).values()))
    return isinstance(value, Tensor) or _has_items(value) or any(isinstance(leaf, _ARRAYS) for leaf in held)


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


def _sizes_text(batch: Any) -> str:
    """How many rows each tensor of a batch could have."""
    found = [(path, leaf) for path, leaf in items(batch) if isinstance(leaf, _ARRAYS) and _can_be_cut(leaf)]
    return ", ".join(f"{place_text(path)} has shape {list(leaf.shape)}" for path, leaf in found[:_SHOWN])


def place_text(path: tuple[Any, ...], what: str = "batch") -> str:
    """A place in a structure, as Python code has it: ``batch['x'][0]``."""
    return what + "".join(f"[{key!r}]" for key in path)


# ---- putting together ------------------------------------------------------------------------------------------------


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], path: Path = ()) -> Any:
    """What a step returned for the batch, from what it returned for each micro-batch.

    ==================================================== ================================================
    tensors and arrays of ``k * size`` rows, one k       concatenated
    lists of ``size`` entries                            concatenated
    floating-point tensors without dimensions, floats    means by weight, without what weighs nothing
    integer and bool tensors without dimensions, ints    sums: they count
    other tensors, if they are equal everywhere          that
    mappings, dataclasses, other sequences               member by member
    anything else that holds no tensors                  the last
    ==================================================== ================================================

    Args:
        outputs: of each micro-batch, at least one.
        sizes: rows of each micro-batch.
        weights: of each micro-batch, not all 0.
        path: of ``outputs`` in what the step returned, for messages.

    Raises:
        UncombinableError: tensors, or containers of tensors, that no rule is for, with their place and shapes.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(isinstance(output, Tensor) for output in outputs):
        return _merge_tensors(outputs, sizes, weights, path)
    if all(isinstance(output, np.ndarray) for output in outputs):
        arrays = [torch.from_numpy(output) for output in outputs]
        return _merge_tensors(arrays, sizes, weights, path).numpy()
    if all(isinstance(output, float) for output in outputs):
        return weighted_mean(outputs, weights)
    if all(isinstance(output, Integral) and not isinstance(output, bool) for output in outputs):
        return sum(outputs)
    if isinstance(first, list) and [len(output) for output in outputs] == list(sizes):
        return [entry for output in outputs for entry in output]
    members = [dict(members_of(output) or ()) for output in outputs]
    if members[0] and all(member.keys() == members[0].keys() for member in members):
        merged = []
        for key in members[0]:
            value = merge_outputs([member[key] for member in members], sizes, weights, (*path, key))
            merged.append((key, value))
        return with_members(first, merged)
    if tensors(outputs):
        kinds = [type(output).__name__ for output in outputs]
        raise UncombinableError(f"{place_text(path, 'output')} differs in its structure between micro-batches: {kinds}")
    return outputs[-1]


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Without what weighs nothing: a mean over no labels is NaN."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(value * weight for value, weight in pairs) / sum(weights)


def _merge_tensors(outputs: Sequence[Tensor], sizes: Sequence[int], weights: Sequence[float], path: Path) -> Tensor:
    first = outputs[0]
    shapes = [list(output.shape) for output in outputs]
    if not any(shapes):
        if first.is_floating_point() or first.is_complex():
            mean: Tensor = weighted_mean(outputs, weights)
            return mean
        return torch.stack(list(outputs)).sum()
    if all(shapes):
        others = {tuple(shape[1:]) for shape in shapes}
        rows = {shape[0] / size for shape, size in zip(shapes, sizes, strict=True)}  # of output for a row of the batch
        if len(others) == 1 and len(rows) == 1 and rows.pop().is_integer():
            return torch.cat(list(outputs))
    if all(torch.equal(output, first) for output in outputs):
        return first
    raise UncombinableError(
        f"{place_text(path, 'output')} has shapes {shapes} for micro-batches of {list(sizes)} rows: its first "
        "dimension is no multiple of the rows, or other dimensions differ"
    )
