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
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.capture.objects import describe, hides_something, is_plain
from lightning_smddp.pipeline.partition.batch_structure import (
    ARRAYS,
    are_alike,
    arrays_in,
    is_sequence,
    length_of,
    place_text,
    sizes_text,
)
from lightning_smddp.pipeline.partition.row_ways import Rows, UnclearBatchError, Ways, is_cuttable, take_rows
from lightning_smddp.pipeline.runtime.host_values import Answers
from lightning_smddp.wire.pytree import Members, Path, leaves, members_of, with_members
from lightning_smddp.wording import counted

Joins: TypeAlias = Mapping[Path, int | None]
"""How what is at some paths is put together, see :func:`combine`."""


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
        value = _take(self.value, order, self.paths, Ways())
        return dataclasses.replace(self, value=value)


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
        # Nothing is cut, so what cannot be cut is not refused, and a doubtful number of rows will do.
        rows = batch_size
        if rows is None:
            rows = rows_of(batch)
        return [MicroBatch(batch, max(1, rows), 1.0)]
    ways = Ways()
    if batch_size is None:
        count = _rows(batch, ways, strict=True)
    elif _has_rows(batch, batch_size, ways):
        count = batch_size
    else:
        sizes = sizes_text(batch)
        raise UnclearBatchError(f"batch_size={batch_size}, but no tensor or list has so many rows: {sizes}")
    cutter = _Cutter(count, batch_size is not None, ways)
    cutter.refuse_opaque(batch)
    number = min(num_microbatches, count)
    if number <= 1 or not cutter.is_clear(batch):
        return [MicroBatch(batch, max(1, count), 1.0)]
    paths = frozenset(cutter.paths(batch))
    return _parts(batch, count, number, paths, ways)


def _parts(
    value: Any,
    rows: int,
    number: int,
    paths: frozenset[Path],
    ways: Ways,
) -> list[MicroBatch]:
    """``value`` in ``number`` parts, or one for each row if there are fewer."""
    number = min(number, rows)
    if number <= 1 or not paths:
        return [MicroBatch(value, rows, 1.0, paths)]
    # The first ``bigger`` parts have one row more than the others: 8 rows in 3 parts are 3, 3 and 2.
    smaller_size, bigger = divmod(rows, number)
    parts = []
    start = 0
    for index in range(number):
        size = smaller_size
        if index < bigger:
            size += 1
        part = _take(value, slice(start, start + size), paths, ways)
        parts.append(MicroBatch(part, size, size / rows, paths))
        start += size
    return parts


def rows_of(batch: Any) -> int:
    """The number of rows that a batch seems to have."""
    rows = _rows(batch, Ways(), strict=False)
    return max(1, rows)


def outer_sizes(batch: Any) -> list[tuple[int, ...]]:
    """The first two dimensions of tensors, and the rows of objects, that are in no list of samples."""
    is_list_of_samples = is_sequence(batch) and _is_list_of_samples(batch)
    sizes = _outer_sizes(batch, Ways(), outermost=not is_list_of_samples)
    return list(sizes)


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


def _rows(batch: Any, ways: Ways, strict: bool) -> int:
    """The number of rows; 1 for a batch without any tensor or list.

    With ``strict`` it is an error if another number is as common.
    """
    if is_sequence(batch) and _is_list_of_samples(batch):
        return len(batch)
    # Each tensor and object outside of inner lists has a vote. Only where there is none, inner lists have: these may
    # hold samples, and then the sizes of what is in them say nothing.
    votes: Counter[int] = Counter()
    for sizes in _outer_sizes(batch, ways, outermost=True):
        votes[sizes[0]] += 1
    if not votes:
        for sequence in _outer_sequences(batch):
            votes.update(_possible_rows(sequence))
    if not votes:
        return 1
    (rows, most), *others = votes.most_common(2)
    if strict and others:
        other, second = others[0]
        if most == second:
            raise UnclearBatchError(
                f"the batch may have {rows} or {other} rows: {sizes_text(batch)}; "
                "say which with PartitionOptions(batch_size_fn=...), a function of the batch"
            )
    return rows


def _outer_sizes(value: Any, ways: Ways, outermost: bool = False) -> Iterator[tuple[int, ...]]:
    """First dimensions of what is in no list or tuple, except an outermost one that holds fields."""
    if isinstance(value, ARRAYS):
        if value.ndim:
            yield _first_sizes(value)
        return
    way = ways.of(value)
    if way is not None:
        if way.is_sure:
            yield (way.rows,)
        return
    if is_sequence(value) and not outermost:
        return
    for _, child in members_of(value) or []:
        yield from _outer_sizes(child, ways)


def _first_sizes(value: Any) -> tuple[int, ...]:
    """The first two dimensions; the first of a nested tensor, whose second one is another in each row."""
    if isinstance(value, Tensor) and value.is_nested:
        return (length_of(value),)
    first_two = value.shape[:2]
    return tuple(map(int, first_two))


def _outer_sequences(value: Any, outermost: bool = True) -> Iterator[Sequence[Any]]:
    """Lists and tuples that are in no other, except in an outermost one that holds them as fields."""
    if is_sequence(value):
        holds_fields = outermost and any(members_of(entry) for entry in value)
        if not holds_fields:
            yield value
            return
    for _, child in members_of(value) or []:
        yield from _outer_sequences(child, outermost=False)


def _possible_rows(sequence: Sequence[Any]) -> set[int]:
    """The number of rows if ``sequence`` has one entry per row, and if it holds fields."""
    sizes = {length_of(array) for array in arrays_in(sequence)}
    if len(sizes) != 1:
        return {len(sequence)}
    if not are_alike(sequence):
        return sizes
    return {len(sequence)} | sizes


def _is_list_of_samples(value: Sequence[Any]) -> bool:
    """Whether a whole batch is a list of samples as the dataset returned them: alike, and not fields of one size."""
    if len(value) < 2 or not are_alike(value):
        return False
    if any(members_of(entry) is None for entry in value):
        return False
    # Alike containers that hold nothing but tensors of one length may as well be a few batches of that many rows.
    arrays = arrays_in(value)
    lengths = {length_of(array) for array in arrays}
    holds_arrays_alone = len(arrays) == len(leaves(value))
    return not (holds_arrays_alone and len(lengths) == 1)


def _has_rows(batch: Any, count: int, ways: Ways) -> bool:
    if isinstance(batch, ARRAYS):
        return batch.ndim > 0 and length_of(batch) == count
    way = ways.of(batch)
    if way is not None and way.rows == count:
        return True
    if is_sequence(batch) and len(batch) == count:
        return True
    children = members_of(batch) or []
    return any(_has_rows(child, count, ways) for _, child in children)


# ---- cutting ---------------------------------------------------------------------------------------------------------


class _Cutter:
    """Applies the rules of this module for a known number of rows.

    ``rows_known``: the caller has said the number, so a list of that length has one entry for each row.
    """

    def __init__(self, count: int, rows_known: bool, ways: Ways) -> None:
        self.count = count
        self.rows_known = rows_known
        self.ways = ways

    def is_clear(self, value: Any, outermost: bool = True) -> bool:
        """Whether every list in ``value`` can be read in one way only."""
        if is_sequence(value):
            reading = self._reading(value, outermost)
            if reading == "rows":
                return True
            if reading == "both":
                return False
        children = members_of(value) or []
        return all(self.is_clear(child, outermost=False) for _, child in children)

    def paths(self, value: Any, path: Path = ()) -> Iterator[Path]:
        """Paths of the values within a batch whose first dimension is the rows of the batch."""
        if isinstance(value, ARRAYS):
            if value.ndim and length_of(value) == self.count:
                yield path
            return
        if is_sequence(value) and self._reading(value, outermost=not path) == "rows":
            yield path
            return
        way = self.ways.of(value)
        if way is not None:
            if way.rows == self.count:
                yield path
            return
        for key, child in members_of(value) or []:
            yield from self.paths(child, (*path, key))

    def refuse_opaque(self, value: Any, path: Path = ()) -> None:
        """Refuse what may hold rows in a way that is not known here. What is within a row does not matter."""
        if is_sequence(value) and self._reading(value, outermost=not path) != "fields":
            return
        way = self.ways.of(value)
        if way is not None and way.rows == self.count:
            return
        children = members_of(value)
        if children is not None:
            for key, child in children:
                self.refuse_opaque(child, (*path, key))
            return
        if _is_opaque(value):
            kind = type(value)
            raise UnclearBatchError(
                f"{place_text(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be cut into "
                "micro-batches; give the module a method `split_batch(batch, num_microbatches)` that returns a list of "
                "batches, or use num_microbatches=1"
            )

    def _reading(self, sequence: Sequence[Any], outermost: bool) -> Literal["rows", "fields", "both"]:
        """What the entries of a list or tuple are: one for each row, or fields, or either."""
        if len(sequence) != self.count:
            return "fields"
        # There are as many entries as rows. If some of the tensors in them have as many rows, too, as in a list of 4
        # tensors of shape (4, 3), the entries may be fields all the same.
        arrays = arrays_in(sequence)
        fitting = [array for array in arrays if length_of(array) == self.count]
        if not fitting:
            return "rows"
        if not are_alike(sequence):
            return "fields"
        if self.rows_known:
            return "rows"
        if outermost or len(fitting) == len(arrays):
            return "both"
        return "rows"


def _take(value: Any, rows: Rows, paths: frozenset[Path], ways: Ways, path: Path = ()) -> Any:
    """Some rows of what is at ``paths``, and all of the rest. ``ways`` are those known for objects of the batch."""
    if path in paths:
        if isinstance(value, ARRAYS) or is_sequence(value):
            return take_rows(value, rows)
        way = ways.of(value)
        assert way is not None
        return way.take(rows)
    children = members_of(value)
    if children is None:
        return value
    depth = len(path)
    leads_to_rows = any(inner[:depth] == path for inner in paths)
    if not leads_to_rows:
        return value  # the very object, for all micro-batches
    taken: Members = []
    for key, child in children:
        part = _take(child, rows, paths, ways, (*path, key))
        taken.append((key, part))
    return with_members(value, taken)


def _is_opaque(value: Any) -> bool:
    """Whether there may be rows in ``value`` that nobody knows how to take."""
    if isinstance(value, ARRAYS):
        return not is_cuttable(value)
    if is_plain(value):
        return False
    kind = type(value)
    if hasattr(kind, "__len__") and hasattr(kind, "__getitem__"):
        return True
    return hides_something(value)


# ---- combining -------------------------------------------------------------------------------------------------------


def combine(outputs: Sequence[Any], sizes: Sequence[int], joins: Joins | None = None) -> Any:
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
        given = counted(len(outputs), "output")
        wanted = counted(len(sizes), "micro-batch")
        raise ValueError(f"{given} for {wanted}; give one for each, and at least one")
    if len(outputs) == 1:
        return outputs[0]
    return _combine(list(outputs), list(sizes), (), joins or {})


def _combine(values: list[Any], sizes: list[int], path: Path, joins: Joins) -> Any:
    first = values[0]
    is_the_batchs = path in joins and joins[path] is None
    if is_the_batchs and _are_equal(values):
        return first
    if _are_all(values, Tensor):
        return _combine_tensors(values, sizes, path, joins.get(path))
    if _are_all(values, np.ndarray):
        tensors = [torch.from_numpy(value) for value in values]
        combined = _combine_tensors(tensors, sizes, path, joins.get(path))
        return combined.numpy()
    if _are_all(values, (float, np.floating)):
        total: Any = 0
        for value, size in zip(values, sizes, strict=True):
            total += value * size
        return total / sum(sizes)
    if any(type(value) is not type(first) for value in values):
        names = [type(value).__name__ for value in values]
        raise UncombinableError(f"{place_text(path)} has types {names} in the micro-batches")
    # Rows before members: a list of as many entries as rows is not combined entry by entry.
    if is_sequence(first) and _one_entry_per_row(values, sizes):
        return type(first)(chain.from_iterable(values))
    children = members_of(first)
    if children is not None:
        return _combine_members(values, sizes, children, path, joins)
    return _combine_plain(values, sizes, path)


def _combine_plain(values: list[Any], sizes: list[int], path: Path) -> Any:
    first = values[0]
    # An int that is the number of rows of each micro-batch counts, also where all micro-batches are as large. 1 for
    # micro-batches of one row may be a setting as well.
    counts_rows = type(first) is int and values == sizes and max(sizes) > 1
    if counts_rows:
        return sum(values)
    if _are_equal(values):
        return first
    if type(first) is int:
        return sum(values)
    raise UncombinableError(
        f"{place_text(path)} is {values} in the micro-batches: no rule makes one {type(first).__name__} of it"
    )


def _are_all(values: list[Any], kind: type | tuple[type, ...]) -> bool:
    return all(isinstance(value, kind) for value in values)


def _combine_tensors(
    values: list[Tensor],
    sizes: list[int],
    path: Path,
    join: int | None,
) -> Tensor:
    first = values[0]
    for value in values:
        if value.dim() != first.dim() or value.dtype != first.dtype:
            signatures = [signature(value) for value in values]
            raise UncombinableError(f"{place_text(path)} is {signatures} in the micro-batches")
    if first.dim() == 0:
        return _combine_scalars(torch.stack(values), sizes)
    if join is not None and join < first.dim() and _differ_only_along(join, values):
        return torch.cat(values, join)
    if _have_rows(values, sizes) and _differ_only_along(0, values):
        return torch.cat(values)
    if _are_equal(values):
        return first
    shapes = [list(value.shape) for value in values]
    raise UncombinableError(
        f"{place_text(path)} has shapes {shapes} for micro-batches of {sizes} rows: "
        f"its first dimension is no multiple of the rows, or other dimensions differ"
    )


def _combine_scalars(stacked: Tensor, sizes: list[int]) -> Tensor:
    """The sum of what counts (integers, flags), else the mean weighted by ``sizes``, computed on the device."""
    if not (stacked.is_floating_point() or stacked.is_complex()):
        return stacked.sum()
    shares = from_numbers(sizes, torch.float64, stacked.device) / sum(sizes)
    weighted = stacked * shares.to(stacked.dtype)
    return weighted.sum()


def _have_rows(values: list[Tensor], sizes: list[int]) -> bool:
    """Whether each has as many entries for each row of its micro-batch: ``k * size``, with one k for all."""
    entries_a_row = set()
    for value, size in zip(values, sizes, strict=True):
        entries, rest = divmod(value.shape[0], size)
        if rest != 0:
            return False
        entries_a_row.add(entries)
    return len(entries_a_row) == 1


def _differ_only_along(dimension: int, values: list[Tensor]) -> bool:
    """Whether all other dimensions are equal, so that they can be concatenated along this one."""
    others = set()
    for value in values:
        sizes = list(value.shape)
        del sizes[dimension]
        others.add(tuple(sizes))
    return len(others) == 1


def _combine_members(
    values: list[Any],
    sizes: list[int],
    children: Members,
    path: Path,
    joins: Joins,
) -> Any:
    members = [dict(members_of(value) or []) for value in values]
    first = members[0]
    if any(member.keys() != first.keys() for member in members):
        keys = [list(member) for member in members]
        raise UncombinableError(f"{place_text(path)} has members {keys} in the micro-batches")
    combined: Members = []
    for key, _ in children:
        of_key = [member[key] for member in members]
        value = _combine(of_key, sizes, (*path, key), joins)
        combined.append((key, value))
    return with_members(values[0], combined)


def _one_entry_per_row(values: list[Sequence[Any]], sizes: list[int]) -> bool:
    """Whether lists of the micro-batches have entries for rows, and are not fields that happen to be as many."""
    lengths = [len(value) for value in values]
    if lengths != sizes:
        return False
    if len(set(sizes)) > 1:
        return True  # a number of fields would be the same in all micro-batches
    first = values[0]
    if not isinstance(first, list):
        return False
    if are_alike(first):
        return True
    # Unlike entries are fields if the tensors in them have the rows.
    return not all(map(_all_have_rows, values, sizes))


def _all_have_rows(value: Sequence[Any], size: int) -> bool:
    arrays = arrays_in(value)
    if not arrays:
        return False
    return all(length_of(array) % size == 0 for array in arrays)


def _are_equal(values: list[Any]) -> bool:
    return all(_equal(value, values[0]) for value in values)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other)
    same = one == other
    return isinstance(same, bool) and same  # an array of results is no answer
