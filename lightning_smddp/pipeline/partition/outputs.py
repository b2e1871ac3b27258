"""What a step returned for each micro-batch, as one value for the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.wire.pytree import Path, members_of, tensors, with_members


class UncombinableError(ValueError):
    """There is no rule that makes one value of those of micro-batches."""


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], path: Path = ()) -> Any:
    """What a step returned for the batch, from what it returned for each micro-batch.

    ==================================================== ================================================
    tensors and arrays of ``k * size`` rows, one k       concatenated
    lists of ``size`` entries                            concatenated
    floating-point tensors without dimensions, floats    means by weight, without what weighs nothing
    integer and bool tensors without dimensions          sums: they count
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


def place_text(path: tuple[Any, ...], what: str = "batch") -> str:
    """A place in a structure, as Python code has it: ``batch['x'][0]``."""
    return what + "".join(f"[{key!r}]" for key in path)
