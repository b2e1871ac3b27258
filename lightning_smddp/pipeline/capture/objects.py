"""Objects in batches: what they consist of, and copies of them for each run of a step."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.wire.pytree import map_leaves, members_of

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, torch.layout}
)
_WITHOUT_PARTS = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, np.generic,
)  # fmt: skip
_DEPTH = 3  # of objects in objects that are looked into


def is_plain(value: Any) -> bool:
    """Whether ``value`` has no parts: a number, a string, a class, a function."""
    return type(value) in _PLAIN or isinstance(value, _WITHOUT_PARTS)


def attributes_of(value: Any) -> dict[str, Any]:
    """Of an object that is no container; empty for what is plain."""
    return {} if is_plain(value) else getattr(value, "__dict__", {})


def describe(value: Any, depth: int = _DEPTH) -> str:
    """What an object consists of: types, shapes, numbers and names, but no contents of tensors and arrays."""
    if isinstance(value, Tensor):
        shape = [list(part.shape) for part in value.unbind()] if value.is_nested else list(value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}{shape}"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}"
    if isinstance(value, (bool, int)):
        return repr(value)
    members = members_of(value)
    if members is None:
        members = list(attributes_of(value).items())
    name = type(value).__name__
    if not members or depth == 0:
        return name
    return f"{name}({', '.join(f'{key}={describe(member, depth - 1)}' for key, member in members)})"


def with_same_memory(value: Any) -> Any:
    """A copy of an object, whose tensors and arrays have the memory of the original's; itself if it has no copy.

    What is done to the copy (other attributes, ``requires_grad``) is not done to the original. Changes of numbers in
    place are, and what is done to objects in its attributes.
    """
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.detach()
    if isinstance(value, np.ndarray):
        return value.view()
    try:
        copied = copy.copy(value)
    except Exception:  # whatever the object's own methods raise: it is used as it is
        return value
    for name, member in attributes_of(copied).items():
        vars(copied)[name] = map_leaves(_same_memory, member)
    return copied


def _same_memory(leaf: Any) -> Any:
    return with_same_memory(leaf) if isinstance(leaf, (Tensor, np.ndarray)) else leaf
