"""How a batch is built, as far as rows are concerned: its sequences and arrays, their lengths, and what is alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.wire.pytree import Path, leaves, members_of

ARRAYS = (Tensor, np.ndarray)


def is_sequence(value: Any) -> bool:
    """Whether ``value`` is a list or tuple whose positions have no names."""
    if not isinstance(value, (list, tuple)) or isinstance(value, torch.Size):
        return False
    return not hasattr(value, "_fields")


def arrays_in(value: Any) -> list[Any]:
    """All tensors and arrays in ``value`` that have dimensions."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, ARRAYS) and leaf.ndim]


def length_of(array: Any) -> int:
    """Of the first dimension, which nested tensors tell by ``size`` alone."""
    if isinstance(array, Tensor):
        return int(array.size(0))
    return len(array)


def are_alike(sequence: Sequence[Any]) -> bool:
    """Whether all entries could be samples of one dataset: the same structure, dtypes and numbers of dimensions."""
    kinds = {_kind(entry) for entry in sequence}
    return len(kinds) <= 1


def _kind(value: Any) -> Any:
    """What a sample and those beside it have in common; can be hashed."""
    if isinstance(value, ARRAYS):
        return type(value), value.dtype, value.ndim
    children = members_of(value)
    if children is None:
        return type(value)
    if isinstance(value, list):  # within samples, of any length
        return type(value), None
    # Sizes are left out, as samples differ in them: images of any height are of one dataset.
    kinds = [(key, _kind(child)) for key, child in children]
    return type(value), tuple(kinds)


def place_text(path: Path) -> str:
    """A place in a batch: ``batch['x'][0]``."""
    return f"batch{path_text(path)}"


def path_text(path: tuple[Any, ...]) -> str:
    """Keys and positions as Python code has them."""
    return "".join(f"[{key!r}]" for key in path)


def sizes_text(value: Any, path: Path = ()) -> str:
    """Where the batch's tensors and lists are, and how many rows each could have."""
    where = place_text(path)
    if isinstance(value, Tensor) and value.is_nested:
        return f"{where} has shape of {length_of(value)} nested tensors"
    if isinstance(value, ARRAYS):
        return f"{where} has shape {list(value.shape)}"
    # Only the first members, as a list of samples may be long.
    texts = []
    if is_sequence(value):
        texts.append(f"{where} has {len(value)} entries")
    children = members_of(value) or []
    for key, child in children[:8]:
        text = sizes_text(child, (*path, key))
        if text:
            texts.append(text)
    return ", ".join(texts)
