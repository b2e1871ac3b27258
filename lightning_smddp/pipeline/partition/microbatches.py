"""A batch of any structure in micro-batches, and what a step returned for each of them as one value again.

A batch is cut by the user's functions, else along the dimension of its rows. What belongs to the rows of a batch of N:

* a tensor or array whose first dimension is N;
* a list or tuple of N entries, one per row: strings, numbers, tensors of any sizes, dicts. If what is in it has N rows,
  too, and its entries are unlike each other, as in ``[images, labels]``, they are fields, each treated by itself;
* an object of length N whose slices are of its type and have the length that was asked for.

Mappings, dataclasses and named tuples are always fields. Everything else is given whole to every micro-batch.

N is the most common first dimension of the tensors outside of inner lists and tuples; without such tensors the length
that most lists agree on. A batch that is itself a list of alike entries may also have one row per entry. Where there
are two readings the loader's batch size decides, else the batch is not cut: one micro-batch is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Complex, Integral
from statistics import multimode
from textwrap import shorten
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_smddp.pytree import Path, leaves, members_of, with_members

SplitBatch: TypeAlias = Callable[[Any, int], Sequence[Any]]
_ARRAYS = (Tensor, np.ndarray)
_NUMERIC = "biufc"  # kinds of numpy's types that torch has, too
_SHOWN = 400  # characters
_WITHOUT_PARTS = (type, FunctionType, MethodType, ModuleType)
DEPTH = 3  # of objects in objects that are looked into
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
        split_batch: the user's way to cut, from a batch and a number: a list of about so many pairs of a batch and its
            number of rows.
        time_first: whether some module takes sequences with time first, so that a tensor's first dimension may be time.
    """

    batch_size_fn: Callable[[Any], int] | None = None
    split_batch: SplitBatch | None = None
    time_first: bool = False

    def rows(self, batch: Any, loader_sizes: Collection[int] = ()) -> int:
        """The number of rows of a batch of a loader whose batches have ``loader_sizes`` rows; empty if it does not say.

        Raises:
            UnclearBatchError: nobody says it, and it is not clear.
        """
        if self.split_batch is not None:
            return max([self.whole(batch).size, *loader_sizes])
        rows = self._given_rows(batch)
        if rows is None:
            rows = _find_rows(batch, loader_sizes)
        else:
            loader_sizes = [rows]
        if _is_sequence(batch) and len(batch) == rows and _are_alike(batch):
            return rows
        arrays = _arrays(_carriers(batch))
        if loader_sizes and any(array.ndim == 1 for array in arrays):  # these have the rows, also in a last batch
            loader_sizes = [*loader_sizes, rows]
        if any(self._may_have_time_first(array, rows, loader_sizes) for array in arrays):
            raise UnclearBatchError(f"the first dimension ({rows}) may be that of time: {shown(batch)}")
        return rows

    def split(self, batch: Any, count: int, rows: int) -> list[MicroBatch]:
        """Cut ``batch`` of ``rows`` into ``count`` micro-batches, or fewer; bigger ones by one row come first.

        Raises:
            UnclearBatchError: something in it cannot be cut, or can be read in two ways.
            ValueError: what ``split_batch`` returns is wrong.
        """
        if self.split_batch is None:
            return split(batch, count, rows)
        parts = list(self.split_batch(batch, count))
        if not parts or not all(map(_is_counted, parts)):
            raise ValueError(
                f"split_batch returned {shown(parts)} for num_microbatches={count}. Return a list of pairs: of a batch "
                "and its number of rows, one at least."
            )
        return _weighted(parts)

    def whole(self, batch: Any) -> MicroBatch:
        """All of a batch as one micro-batch."""
        rows = self._given_rows(batch)
        return MicroBatch(batch, max(1, rows_of(batch) if rows is None else rows), 1.0)

    def _may_have_time_first(self, array: Any, rows: int, loader_sizes: Collection[int]) -> bool:
        if array.ndim < 2:
            return False
        first, second = array.shape[:2]
        if self.time_first and (not loader_sizes or first == second == rows):
            return True
        is_second = second == rows or (second in loader_sizes and rows not in loader_sizes)
        return second != first and is_second

    def _given_rows(self, batch: Any) -> int | None:
        return None if self.batch_size_fn is None else self.batch_size_fn(batch)


def has_time_first(root: nn.Module) -> bool:
    """Whether some module takes sequences with time first, by the attribute that torch's modules have for it."""
    return any(getattr(module, "batch_first", None) is False for module in root.modules())


def looks_at_other_rows(module: nn.Module) -> list[str]:
    """Names of layers that normalise over the rows they are given."""
    return [name for name, part in module.named_modules() if isinstance(part, _BATCH_NORMS) and part.training]


def split(batch: Any, count: int, rows: int) -> list[MicroBatch]:
    """Cut ``batch`` of ``rows`` into ``count`` micro-batches, or one for each row if there are fewer.

    Raises:
        UnclearBatchError: something in it cannot be cut, or can be read in two ways; with its path.
    """
    number = max(1, min(count, rows))
    smaller, bigger = divmod(rows, number)  # 8 rows in 3 parts are 3, 3 and 2
    sizes = [smaller + (index < bigger) for index in range(number)]
    bounds = list(accumulate(sizes, initial=0))
    parts = _split(batch, rows, list(map(slice, bounds, bounds[1:])))
    if number == 1:
        return [MicroBatch(batch, max(1, rows), 1.0)]
    if parts is None:
        raise UnclearBatchError(f"nothing in the batch has {rows} rows: {shown(batch)}")
    return _weighted(list(zip(parts, sizes, strict=True)))


def _is_counted(part: Any) -> bool:
    return type(part) is tuple and len(part) == 2 and type(part[1]) is int and part[1] > 0


def _weighted(parts: Sequence[tuple[Any, int]]) -> list[MicroBatch]:
    rows = sum(size for _, size in parts)
    return [MicroBatch(value, size, size / rows) for value, size in parts]


def signature(value: Any, depth: int = DEPTH, numbers: bool = False) -> str:
    """What a micro-batch (or any value) is made of: structure, types, shapes, dtypes, ``requires_grad``, but no values.

    Equal texts mean that stages exchange tensors of equal shapes, as far as shapes do not depend on values. So integers
    that objects hold are shown with their values (``numbers``): they may be sizes.
    """
    name = type(value).__name__
    if isinstance(value, Tensor):
        shape = [list(part.shape) for part in value.unbind()] if value.is_nested else list(value.shape)
        gradient = ", grad" if value.requires_grad else ""
        return f"{str(value.dtype).removeprefix('torch.')}{shape}{gradient}"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}"
    if numbers and isinstance(value, int):
        return repr(value)
    members: Any = members_of(value)
    if members is None and depth:
        members, numbers, depth = attributes_of(value).items(), True, depth - 1
    texts = [f"{key}={signature(member, depth, numbers)}" for key, member in members or ()]
    return f"{name}({', '.join(texts)})" if texts else name


def attributes_of(value: Any) -> dict[str, Any]:
    """Of an object that is no container; empty for what is none of the batch's, such as a class or a function."""
    return {} if isinstance(value, _WITHOUT_PARTS) else getattr(value, "__dict__", {})


# ---- how many rows ---------------------------------------------------------------------------------------------------


def rows_of(batch: Any) -> int:
    """The number of rows that a batch seems to have, at least 1."""
    return max([1, *_readings(batch, ())])


def _find_rows(batch: Any, loader_sizes: Collection[int]) -> int:
    """Of the readings that there are the only one, or that of the loader."""
    readings = _readings(batch, loader_sizes) or [1]
    likely = readings if len(readings) == 1 else [size for size in loader_sizes if size in readings]
    if not likely:
        raise UnclearBatchError(f"the batch may have {' or '.join(map(str, readings))} rows: {shown(batch)}")
    return likely[0]


def _readings(batch: Any, loader_sizes: Collection[int]) -> list[int]:
    """The numbers of rows that a batch may have, each once."""
    carriers = list(_carriers(batch))
    lengths = list(map(len, _arrays(carriers))) or [rows for carrier in carriers for rows in _rows_of_list(carrier)]
    likely = set(multimode(lengths))
    # Entries that are alike may be samples as a dataset has them; else tensors are fields, and containers batches of
    # several loaders.
    if _is_sequence(batch) and _are_alike(batch):
        may_be_samples = not likely or len(batch) in loader_sizes or members_of(batch[0]) is not None
        likely |= {len(batch)} if may_be_samples else set()
    return sorted(likely)


def _rows_of_list(value: Any) -> set[int]:
    """It has an entry for each row, or fields of as many rows, or may be read in both ways."""
    lengths = _lengths_in(value)
    if len(lengths) != 1:
        return {len(value)}
    return lengths | {len(value)} if _is_sequence(value) and _are_alike(value) else lengths


def _carriers(value: Any, outermost: bool = True) -> Iterator[Any]:
    """What may have rows: tensors and arrays, lists within others, and objects with slices."""
    if isinstance(value, _ARRAYS):
        if _can_be_cut(value) and value.ndim:
            yield value
    elif (_is_sequence(value) and not outermost) or _sliced_length(value) is not None:
        yield value
    elif not isinstance(value, PackedSequence):
        for _, child in members_of(value) or ():
            yield from _carriers(child, outermost=False)


# ---- cutting ---------------------------------------------------------------------------------------------------------


def _split(value: Any, rows: int, slices: Sequence[slice], path: Path = ()) -> list[Any] | None:
    """What each micro-batch gets of ``value``; None: the very object."""
    is_array = isinstance(value, _ARRAYS) and _can_be_cut(value)
    is_list = _is_sequence(value) and len(value) == rows and not _are_fields(value, rows, path)
    has_rows = is_array and value.ndim and len(value) == rows
    if has_rows or is_list or _sliced_length(value) == rows:
        return [value[part] for part in slices]
    if not is_array and _is_opaque(value):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            kind = f"sparse {kind}"
        raise UnclearBatchError(f"{place_text(path)} is a {kind}, which cannot be cut")
    children = members_of(value) or []
    parts = {key: _split(child, rows, slices, (*path, key)) for key, child in children}
    if not any(parts.values()):
        return None
    members = [(key, parts[key] or [child] * len(slices)) for key, child in children]
    return [with_members(value, [(key, one[index]) for key, one in members]) for index in range(len(slices))]


def _are_fields(values: Sequence[Any], rows: int, path: Path) -> bool:
    """Whether the entries of a list of as many ``rows`` have these rows themselves."""
    lengths = _lengths_in(values)
    has_lists = any(_is_sequence(entry) and len(entry) == rows for entry in values)
    if rows == 1 or not (rows in lengths or has_lists):
        return False
    are_alike = _are_alike(values)
    if are_alike == (lengths == {rows} or has_lists):
        raise UnclearBatchError(f"{place_text(path)} may have an entry for each row, or be {rows} fields")
    return not are_alike


def _can_be_cut(array: Any) -> bool:
    return not isinstance(array, Tensor) or (array.layout is torch.strided and not array.is_nested)


def _sliced_length(value: Any) -> int | None:
    """The length of an object whose slices are of its type, and of the length that was asked for; None for others."""
    if isinstance(value, (*_ARRAYS, list, tuple, dict, str, bytes)) or not hasattr(type(value), "__getitem__"):
        return None
    try:
        length = len(value)
        part = value[: length - 1]
    except Exception:  # whatever its methods raise: it has no rows to slice
        return None
    return length if length and type(part) is type(value) and len(part) == length - 1 else None


def _is_opaque(value: Any) -> bool:
    """Whether there may be rows in ``value`` that nobody knows how to take."""
    if isinstance(value, (Tensor, PackedSequence)):
        return True
    if isinstance(value, (str, bytes, np.generic)) or members_of(value) is not None:
        return False
    held = leaves(list(attributes_of(value).values()))
    return hasattr(type(value), "__getitem__") or any(isinstance(leaf, _ARRAYS) for leaf in held)


def _is_sequence(value: Any) -> bool:
    """Whether ``value`` is a list or tuple whose positions have no names."""
    return isinstance(value, (list, tuple)) and not isinstance(value, torch.Size) and not hasattr(value, "_fields")


def _arrays(values: Iterable[Any]) -> list[Any]:
    """Tensors and arrays that have a length."""
    return [value for value in values if isinstance(value, _ARRAYS) and value.ndim]


def _lengths_in(value: Any) -> set[int]:
    """Of all tensors and arrays in it."""
    return {len(array) for array in _arrays(leaves(value))}


def _are_alike(sequence: Sequence[Any]) -> bool:
    """Whether all entries could be samples of one dataset: of one type, and tensors of one dtype and dimension."""
    kinds = {(type(entry), getattr(entry, "dtype", None), getattr(entry, "ndim", None)) for entry in sequence}
    return len(kinds) == 1


def shown(batch: Any) -> str:
    """For messages: a list of samples may be long."""
    return shorten(signature(batch), _SHOWN, placeholder=" ...")


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
    integer and bool tensors without dimensions, ints    sums: they count; means where others are floats
    other tensors, if they are equal everywhere          that
    mappings, dataclasses, other sequences               member by member
    anything else that holds no tensors or arrays        the last
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
    if all(isinstance(output, Tensor) or _is_numeric(output) for output in outputs):
        whole = _merge_tensors(list(map(torch.as_tensor, outputs)), sizes, weights, path)
        return whole.numpy() if isinstance(first, np.ndarray) else whole
    if all(isinstance(output, Complex) and not isinstance(output, bool) for output in outputs):
        counts = all(isinstance(output, Integral) for output in outputs)
        return sum(outputs) if counts else weighted_mean(outputs, weights)
    if isinstance(first, list) and [len(output) for output in outputs] == list(sizes):
        return [entry for output in outputs for entry in output]
    members = [dict(members_of(output) or ()) for output in outputs]
    if members[0] and all(member.keys() == members[0].keys() for member in members):
        merged = [
            (key, merge_outputs([member[key] for member in members], sizes, weights, (*path, key)))
            for key in members[0]
        ]
        return with_members(first, merged)
    if any(isinstance(leaf, _ARRAYS) for leaf in leaves(outputs)):
        kinds = [type(output).__name__ for output in outputs]
        raise UncombinableError(f"{place_text(path, 'output')} has no rule for {kinds} of micro-batches")
    return outputs[-1]


def _is_numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in _NUMERIC


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Without what weighs nothing: a mean over no labels is NaN."""
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(value * weight for value, weight in pairs) / sum(weights)


def _merge_tensors(outputs: list[Tensor], sizes: Sequence[int], weights: Sequence[float], path: Path) -> Tensor:
    first = outputs[0]
    shapes = [list(output.shape) for output in outputs]
    if not any(shapes):
        if first.is_floating_point() or first.is_complex():
            return weighted_mean(outputs, weights)  # type: ignore[no-any-return]
        return torch.stack(outputs).sum()
    if all(shapes):
        others = {tuple(shape[1:]) for shape in shapes}
        rows = {shape[0] / size for shape, size in zip(shapes, sizes, strict=True)}  # of output for a row of the batch
        if len(others) == 1 and len(rows) == 1 and rows.pop().is_integer():
            return torch.cat(outputs)
    if all(torch.equal(output, first) for output in outputs):
        return first
    raise UncombinableError(
        f"{place_text(path, 'output')} has shapes {shapes} for micro-batches of {list(sizes)} rows: its first "
        "dimension is no multiple of the rows, or other dimensions differ"
    )
