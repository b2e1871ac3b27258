"""Cuts a batch of any structure into micro-batches, and puts together what a step returned for each of them.

What belongs to the rows of a batch of N rows, in :func:`split`:

* a tensor or array whose first dimension is N;
* an object of N rows that can be cut by a method of its own (:mod:`~lightning_smddp.pipeline.partition.row_ways`);
* a list or tuple of N entries is one entry per row: strings, numbers, objects, tensors of any sizes, dicts. It is a
  collection of fields instead, each treated by itself, when its entries are unlike each other and some have N rows,
  as in ``[images, labels]``. Where both readings fit (a list of N alike tensors of N rows), the batch is not cut: one
  micro-batch is always right.

Mappings, dataclasses and named tuples are always fields. Everything else is given whole to every micro-batch.

N is the most common first dimension of the tensors (number of rows of the objects) outside inner lists and tuples.
Without such tensors it is the number that most inner lists and tuples agree on, by their lengths or by the first
dimension of all that they hold. A batch that is itself a list of alike dicts, tuples or dataclasses has one row per
entry, unless all that these hold are tensors of one first dimension (then each of them is a batch of that size).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.capture.objects import describe, hides_something, is_plain
from lightning_smddp.pipeline.partition.row_ways import Rows, UnclearBatchError, Ways, is_cuttable, take_rows
from lightning_smddp.pipeline.runtime.host_values import Answers
from lightning_smddp.wire.pytree import Members, Path, leaves, members_of, with_members
from lightning_smddp.wording import counted

_ARRAYS = (Tensor, np.ndarray)
_NO_JOIN = -1


class Cuts(Protocol):
    """What has cut a batch, and can cut its micro-batches further: a ``Splitter``."""

    def again(self, microbatch: MicroBatch, count: int) -> list[MicroBatch]:
        """Cut a micro-batch further."""
        ...


class UncombinableError(ValueError):
    """There is no rule that makes one value of those of micro-batches."""


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        value: As the batch, with fewer rows; its tensors are views of the batch's.
        size: Its number of rows.
        weight: Its share of the batch's rows: a mean over the batch is the sum of weighted means.
        paths: Where in the batch its rows are, as found in the whole batch: a part could be read in more ways.
        cuts: What cut it, and can cut it further, if it was not :func:`split`.
        answers: What Python code has read of it; a changed copy has none.
    """

    value: Any
    size: int
    weight: float
    paths: frozenset[Path] = dataclasses.field(default=frozenset(), compare=False, repr=False)
    cuts: Cuts | None = dataclasses.field(default=None, compare=False, repr=False)
    answers: Answers = dataclasses.field(init=False, default_factory=Answers, compare=False, repr=False)

    def split(self, count: int) -> list[MicroBatch]:
        """Cut it as its batch was cut: into ``count`` parts, or fewer; weights are shares of this micro-batch."""
        if self.cuts is not None:
            return self.cuts.again(self, count)
        return _parts(self.value, self.size, count, self.paths, Ways())

    def with_rows_in(self, order: list[int]) -> MicroBatch:
        """The same rows in another order."""
        return dataclasses.replace(self, value=_take(self.value, order, self.paths, Ways()))


def split(batch: Any, num_microbatches: int, batch_size: int | None = None) -> list[MicroBatch]:
    """Cut ``batch`` into micro-batches whose sizes differ by at most one, the bigger ones first.

    Args:
        batch: Any nesting of mappings, sequences and dataclasses.
        num_microbatches: How many; fewer come back when the batch has fewer rows, or may not be cut.
        batch_size: The number of rows, for batches that do not show it.

    Raises:
        UnclearBatchError: when the number of rows is not clear, or an object cannot be cut; with the paths and the
            cure.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
    if num_microbatches == 1:
        rows = batch_size
        if rows is None:
            rows = _rows(batch, strict=False)
        return [MicroBatch(batch, max(1, rows), 1.0)]
    ways = Ways()
    if batch_size is None:
        count = _rows(batch, ways=ways)
    elif _has_rows(batch, batch_size, ways):
        count = batch_size
    else:
        raise UnclearBatchError(
            f"batch_size={batch_size}, but no tensor or list has so many rows: {_sizes_text(batch)}"
        )
    cutter = _Cutter(count, batch_size is not None, ways)
    cutter.refuse_opaque(batch)
    if min(num_microbatches, count) <= 1 or not cutter.is_clear(batch):
        return [MicroBatch(batch, max(1, count), 1.0)]
    return _parts(batch, count, num_microbatches, frozenset(cutter.paths(batch)), ways)


def _parts(value: Any, rows: int, number: int, paths: frozenset[Path], ways: Ways) -> list[MicroBatch]:
    """``value`` in ``number`` parts, or one for each row if there are fewer."""
    number = min(number, rows)
    if number <= 1 or not paths:
        return [MicroBatch(value, rows, 1.0, paths)]
    size, bigger = divmod(rows, number)
    parts, start = [], 0
    for index in range(number):
        stop = start + size + (index < bigger)
        part = _take(value, slice(start, stop), paths, ways)
        part_rows = stop - start
        parts.append(MicroBatch(part, part_rows, part_rows / rows, paths))
        start = stop
    return parts


def rows_of(batch: Any) -> int:
    """The number of rows that a batch seems to have."""
    return max(1, _rows(batch, strict=False))


def outer_sizes(batch: Any) -> list[tuple[int, ...]]:
    """The first two dimensions of tensors, and the rows of objects, that are in no list of samples."""
    is_list_of_samples = _is_sequence(batch) and _is_list_of_samples(batch)
    return list(_outer_sizes(batch, Ways(), outermost=not is_list_of_samples))


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


def _rows(batch: Any, strict: bool = True, ways: Ways | None = None) -> int:
    """The number of rows; 1 for a batch without any tensor or list."""
    if _is_sequence(batch) and _is_list_of_samples(batch):
        return len(batch)
    votes = Counter(sizes[0] for sizes in _outer_sizes(batch, ways or Ways(), outermost=True))
    if not votes:
        for sequence in _outer_sequences(batch):
            votes.update(_possible_rows(sequence))
    if not votes:
        return 1
    (rows, most), (other, second) = [*votes.most_common(2), (0, 0)][:2]
    if strict and most == second:
        raise UnclearBatchError(
            f"the batch may have {rows} or {other} rows: {_sizes_text(batch)}; "
            "say which with PartitionOptions(batch_size_fn=...), a function of the batch"
        )
    return rows


def _outer_sizes(value: Any, ways: Ways, outermost: bool = False) -> Iterator[tuple[int, ...]]:
    """First dimensions of what is in no list or tuple, except an outermost one that holds fields."""
    if isinstance(value, _ARRAYS):
        if value.ndim:
            yield _first_sizes(value)
    elif (way := ways.of(value)) is not None:
        if way.is_sure:
            yield (way.rows,)
    elif not _is_sequence(value) or outermost:
        for _, child in members_of(value) or []:
            yield from _outer_sizes(child, ways)


def _first_sizes(value: Any) -> tuple[int, ...]:
    """The first two dimensions; the first of a nested tensor, whose second one is another in each row."""
    if isinstance(value, Tensor) and value.is_nested:
        return (_length(value),)
    return tuple(int(size) for size in value.shape[:2])


def _outer_sequences(value: Any, outermost: bool = True) -> Iterator[Sequence[Any]]:
    """Lists and tuples that are in no other, except in an outermost one that holds them as fields."""
    if _is_sequence(value) and not (outermost and any(members_of(entry) for entry in value)):
        yield value
    else:
        for _, child in members_of(value) or []:
            yield from _outer_sequences(child, outermost=False)


def _possible_rows(sequence: Sequence[Any]) -> set[int]:
    """The number of rows if ``sequence`` has one entry per row, and if it holds fields."""
    sizes = {_length(array) for array in _arrays(sequence)}
    if len(sizes) != 1:
        return {len(sequence)}
    if not _alike(sequence):
        return sizes
    return {len(sequence)} | sizes


def _is_list_of_samples(value: Sequence[Any]) -> bool:
    """Whether a whole batch is a list of samples as the dataset returned them: alike, and not fields of one size."""
    if len(value) < 2 or not _alike(value):
        return False
    if any(members_of(entry) is None for entry in value):
        return False
    arrays = _arrays(value)
    sizes = {_length(array) for array in arrays}
    are_fields = len(sizes) == 1 and len(arrays) == len(leaves(value))
    return not are_fields


def _has_rows(batch: Any, count: int, ways: Ways) -> bool:
    if isinstance(batch, _ARRAYS):
        return batch.ndim > 0 and _length(batch) == count
    way = ways.of(batch)
    if way is not None and way.rows == count:
        return True
    if _is_sequence(batch) and len(batch) == count:
        return True
    return any(_has_rows(child, count, ways) for _, child in members_of(batch) or [])


# ---- cutting ---------------------------------------------------------------------------------------------------------


class _Cutter:
    """Applies the rules of this module for a known number of rows."""

    def __init__(self, count: int, rows_known: bool, ways: Ways) -> None:
        self.count, self.rows_known, self.ways = count, rows_known, ways

    def is_clear(self, value: Any, outermost: bool = True) -> bool:
        """Whether every list in ``value`` can be read in one way only."""
        if _is_sequence(value):
            reading = self._reading(value, outermost)
            if reading != "fields":
                return reading == "rows"
        return all(self.is_clear(child, outermost=False) for _, child in members_of(value) or [])

    def paths(self, value: Any, path: Path = ()) -> Iterator[Path]:
        """Paths of the values within a batch whose first dimension is the rows of the batch."""
        if isinstance(value, _ARRAYS):
            if value.ndim and _length(value) == self.count:
                yield path
            return
        if _is_sequence(value) and self._reading(value, outermost=not path) == "rows":
            yield path
            return
        way = self.ways.of(value)
        if way is not None:
            if way.rows == self.count:
                yield path
            return
        for key, child in members_of(value) or []:
            yield from self.paths(child, (*path, key))

    def refuse_opaque(self, value: Any, path: tuple[Any, ...] = ()) -> None:
        """Refuse what may hold rows in a way that is not known here. What is within a row does not matter."""
        if _is_sequence(value) and self._reading(value, outermost=not path) != "fields":
            return
        way = self.ways.of(value)
        if way is not None and way.rows == self.count:
            return
        children = members_of(value)
        for key, child in children or []:
            self.refuse_opaque(child, (*path, key))
        if children is None and _is_opaque(value):
            raise UnclearBatchError(
                f"{_where(path)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be cut into "
                "micro-batches; give the module a method `split_batch(batch, num_microbatches)` that returns a list of "
                "batches, or use num_microbatches=1"
            )

    def _reading(self, sequence: Sequence[Any], outermost: bool) -> Literal["rows", "fields", "both"]:
        """What the entries of a list or tuple are: one for each row, or fields, or either."""
        if len(sequence) != self.count:
            return "fields"
        arrays = _arrays(sequence)
        fitting = sum(_length(array) == self.count for array in arrays)
        if not fitting:
            return "rows"
        if not _alike(sequence):
            return "fields"
        if self.rows_known:
            return "rows"
        if outermost or fitting == len(arrays):
            return "both"
        return "rows"


def _take(value: Any, rows: Rows, paths: frozenset[Path], ways: Ways, path: Path = ()) -> Any:
    """Some rows of what is at ``paths``, and all of the rest. ``ways`` are those known for objects of the batch."""
    if path in paths:
        if isinstance(value, _ARRAYS) or _is_sequence(value):
            return take_rows(value, rows)
        way = ways.of(value)
        assert way is not None
        return way.take(rows)
    children = members_of(value)
    if children is None or not any(inner[: len(path)] == path for inner in paths):
        return value
    taken = [(key, _take(child, rows, paths, ways, (*path, key))) for key, child in children]
    return with_members(value, taken)


def _is_opaque(value: Any) -> bool:
    if isinstance(value, _ARRAYS):
        return not is_cuttable(value)
    if is_plain(value):
        return False
    sized = hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")
    return sized or hides_something(value)


# ---- combining -------------------------------------------------------------------------------------------------------


def combine(outputs: Sequence[Any], sizes: Sequence[int], joins: Mapping[Path, int | None] | None = None) -> Any:
    """What one process would have returned for the whole batch, from what a step returned for each micro-batch.

    ``joins`` says for some paths along which dimension their tensors are concatenated, or with None that a value which
    is equal in all micro-batches is the batch's, too: a length of rows, not a count of them. For all others:

    ========================================= =========================================================
    tensors of ``k * size`` rows, one k       concatenated
    0-d floating-point tensors, floats        mean, weighted by size
    0-d integer and bool tensors              sum (they count)
    ints that differ, or are the sizes > 1    sum
    lists of ``size`` entries                 concatenated (tuples only where their lengths differ)
    mappings, dataclasses, other sequences    member by member
    anything else that is equal everywhere    that value
    ========================================= =========================================================

    Raises:
        UncombinableError: naming the path, when there is no rule.
    """
    if len(outputs) != len(sizes) or not outputs:
        raise ValueError(
            f"{counted(len(outputs), 'output')} for {counted(len(sizes), 'micro-batch')}; give one for each, and at "
            "least one"
        )
    if len(outputs) == 1:
        return outputs[0]
    return _combine(list(outputs), list(sizes), (), joins or {})


def _combine(values: list[Any], sizes: list[int], path: tuple[Any, ...], joins: Mapping[Path, int | None]) -> Any:
    first = values[0]
    if joins.get(path, _NO_JOIN) is None and _are_equal(values):
        return first
    if all(isinstance(value, Tensor) for value in values):
        return _combine_tensors(values, sizes, path, joins.get(path))
    if all(isinstance(value, np.ndarray) for value in values):
        tensors = [torch.from_numpy(value) for value in values]
        return _combine_tensors(tensors, sizes, path, joins.get(path)).numpy()
    if all(isinstance(value, (float, np.floating)) for value in values):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    if any(type(value) is not type(first) for value in values):
        raise UncombinableError(
            f"{_where(path)} has types {[type(value).__name__ for value in values]} in the micro-batches"
        )
    if _is_sequence(first) and _one_entry_per_row(values, sizes):
        return type(first)(chain.from_iterable(values))
    children = members_of(first)
    if children is not None:
        return _combine_members(values, sizes, children, path, joins)
    if type(first) is int and values == sizes and max(sizes) > 1:
        return sum(values)
    if _are_equal(values):
        return first
    if type(first) is int:
        return sum(values)
    raise UncombinableError(
        f"{_where(path)} is {values} in the micro-batches: no rule makes one {type(first).__name__} of it"
    )


def _combine_tensors(values: list[Tensor], sizes: list[int], path: tuple[Any, ...], join: int | None) -> Tensor:
    if any(value.dim() != values[0].dim() or value.dtype != values[0].dtype for value in values):
        raise UncombinableError(f"{_where(path)} is {[signature(value) for value in values]} in the micro-batches")
    first = values[0]
    if first.dim() == 0:
        stacked = torch.stack(values)
        if not (stacked.is_floating_point() or stacked.is_complex()):
            return stacked.sum()
        shares = from_numbers(sizes, torch.float64, stacked.device) / sum(sizes)
        return (stacked * shares.to(stacked.dtype)).sum()
    if join is not None and join < first.dim():
        others = {_without(value.shape, join) for value in values}
        if len(others) == 1:
            return torch.cat(values, join)
    entries_a_row = {divmod(value.shape[0], size) for value, size in zip(values, sizes, strict=True)}
    others = {_without(value.shape, 0) for value in values}
    if len(entries_a_row) == 1 and len(others) == 1:
        ((_, rest),) = entries_a_row
        if rest == 0:
            return torch.cat(values)
    if _are_equal(values):
        return first
    raise UncombinableError(
        f"{_where(path)} has shapes {[list(value.shape) for value in values]} for micro-batches of {sizes} rows: "
        f"its first dimension is no multiple of the rows, or other dimensions differ"
    )


def _without(shape: Sequence[int], dimension: int) -> tuple[int, ...]:
    return (*shape[:dimension], *shape[dimension + 1 :])


def _combine_members(
    values: list[Any], sizes: list[int], children: Members, path: tuple[Any, ...], joins: Mapping[Path, int | None]
) -> Any:
    members = [dict(members_of(value) or []) for value in values]
    if any(member.keys() != members[0].keys() for member in members):
        raise UncombinableError(
            f"{_where(path)} has members {[list(member) for member in members]} in the micro-batches"
        )
    combined = []
    for key, _ in children:
        of_key = [member[key] for member in members]
        combined.append((key, _combine(of_key, sizes, (*path, key), joins)))
    return with_members(values[0], combined)


def _one_entry_per_row(values: list[Sequence[Any]], sizes: list[int]) -> bool:
    """Whether lists of the micro-batches have entries for rows, and are not fields that happen to be as many."""
    if [len(value) for value in values] != sizes:
        return False
    if len(set(sizes)) > 1:
        return True
    first = values[0]
    if not isinstance(first, list):
        return False
    if _alike(first):
        return True
    pairs = zip(values, sizes, strict=True)
    return not all(_all_have_rows(value, size) for value, size in pairs)


def _all_have_rows(value: Sequence[Any], size: int) -> bool:
    arrays = _arrays(value)
    return bool(arrays) and all(_length(array) % size == 0 for array in arrays)


def _are_equal(values: list[Any]) -> bool:
    return all(_equal(value, values[0]) for value in values)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    same = one == other
    return isinstance(same, bool) and same  # an array of results is no answer


# ---- structure -------------------------------------------------------------------------------------------------------


def _is_sequence(value: Any) -> bool:
    """Whether ``value`` is a list or tuple whose positions have no names."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


def _arrays(value: Any) -> list[Any]:
    """All tensors and arrays in ``value`` that have dimensions."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, _ARRAYS) and leaf.ndim]


def _length(array: Any) -> int:
    """Of the first dimension, which nested tensors tell by ``size`` alone."""
    if isinstance(array, Tensor):
        return int(array.size(0))
    return len(array)


def _alike(sequence: Sequence[Any]) -> bool:
    """Whether all entries could be samples of one dataset: the same structure, dtypes and numbers of dimensions."""
    return len({_kind(entry) for entry in sequence}) <= 1


def _kind(value: Any) -> Any:
    if isinstance(value, _ARRAYS):
        return type(value), value.dtype, value.ndim
    children = members_of(value)
    if children is None:
        return type(value)
    if isinstance(value, list):  # within samples, of any length
        return type(value), None
    return type(value), tuple((key, _kind(child)) for key, child in children)


def _where(path: tuple[Any, ...]) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _sizes_text(value: Any, path: tuple[Any, ...] = ()) -> str:
    """Where the batch's tensors and lists are, and how many rows each could have."""
    where = _where(path)
    if isinstance(value, Tensor) and value.is_nested:
        return f"{where} has shape of {_length(value)} nested tensors"
    if isinstance(value, _ARRAYS):
        return f"{where} has shape {list(value.shape)}"
    texts = []
    if _is_sequence(value):
        texts.append(f"{where} has {len(value)} entries")
    children = members_of(value) or []
    texts += [_sizes_text(child, (*path, key)) for key, child in children[:8]]
    return ", ".join(filter(None, texts))
