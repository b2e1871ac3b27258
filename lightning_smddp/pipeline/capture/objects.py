"""What any Python object is made of: batches are not only dicts and lists, but graphs, tables and classes of users.

An object shows its parts as it would to ``pickle`` (``__reduce_ex__``, and so ``__getstate__``), but nothing is
pickled: what is found is compared and described, and never leaves the process in this form.
"""

from __future__ import annotations

import copy
import copyreg
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.wire.pytree import members_of

Parts = list[tuple[Any, Any]]

PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, torch.layout}
)
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_WITHOUT_PARTS = (*_BY_NAME, np.generic)
_PROTOCOL = 4  # of pickle: objects show their parts in another way under another one


def is_plain(value: Any) -> bool:
    """Whether ``value`` has no parts: a number, a string, a class, a function."""
    return type(value) in PLAIN or isinstance(value, _WITHOUT_PARTS)


def parts_of(value: Any) -> Parts | None:
    """The parts of an object with their names; none for what :func:`is_plain` and for arrays of numbers.

    Returns:
        None if the object does not tell: it can be neither pickled nor looked into (a lock, a generator).
    """
    if is_plain(value) or isinstance(value, Tensor):
        return []
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            return []
        return list(enumerate(value.reshape(-1).tolist()))
    members = members_of(value)
    if members is not None:
        return list(members)
    if isinstance(value, (set, frozenset)):
        return [("member", member) for member in value]
    if isinstance(value, weakref.ref):
        return [("referent", value())]
    return _reduced(value)


def _reduced(value: Any) -> Parts | None:
    """The parts that ``value`` would show to ``pickle``; else its attributes, or None if it has none."""
    reducer = copyreg.dispatch_table.get(type(value))
    try:
        if reducer is not None:
            reduced = reducer(value)
        else:
            reduced = value.__reduce_ex__(_PROTOCOL)
    except Exception:  # whatever the object's own method raises: it does not want to be taken apart
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            return None
        return list(attributes.items())
    if isinstance(reduced, str):  # the name of something global
        return []
    # what copies and unpickles by: (function, its arguments, state, iterator of entries, iterator of items, setter)
    padded = (*reduced, None, None, None)
    made, arguments, state, entries, mapped = padded[:5]
    parts: Parts = [("made by", made), *enumerate(arguments)]
    if state is not None:
        parts.append(("state", state))
    if entries is not None:
        parts.append(("entries", list(entries)))
    if mapped is not None:
        parts.append(("items", list(mapped)))
    return parts


def _look_into(value: Any) -> tuple[list[Any], list[Any]]:
    """All tensors and arrays that an object consists of, and all parts that do not tell what they consist of."""
    parts, silent = _everything(value)
    arrays = [part for part in parts if isinstance(part, (Tensor, np.ndarray))]
    return arrays, silent


def _everything(value: Any) -> tuple[list[Any], list[Any]]:
    """All that an object consists of but plain things, and what of it does not tell what it consists of."""
    # Parts may be made when they are asked for (an object's state, a list of entries), and be gone behind the loop.
    seen: dict[int, Any] = {}  # objects are kept, so that no other one gets their identity
    silent: list[Any] = []
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) in PLAIN or id(part) in seen:
            continue
        seen[id(part)] = part
        parts = parts_of(part)
        if parts is None:
            silent.append(part)
            continue
        waiting += [child for _, child in parts]
    return list(seen.values()), silent


def describe(value: Any) -> str:
    """What an object consists of: types, shapes, numbers and names, but no contents of tensors and arrays."""
    return _describe(value, {})


def _describe(value: Any, seen: dict[int, Any]) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{_shape(value)}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"numpy {value.dtype}{list(value.shape)}"
    if isinstance(value, (bool, int)):
        return repr(value)
    name = type(value).__name__
    if isinstance(value, _BY_NAME):
        return str(getattr(value, "__qualname__", name))
    if is_plain(value) or id(value) in seen:
        return name
    seen[id(value)] = value
    texts = []
    for key, part in parts_of(value) or []:
        texts.append(f"{_name(key)}={_describe(part, seen)}")
    return f"{name}({', '.join(texts)})"


def _name(key: Any) -> str:
    if is_plain(key):
        return str(key)
    return type(key).__name__


def _shape(tensor: Tensor) -> str:
    if tensor.is_nested:
        shapes = [list(part.shape) for part in tensor.unbind()]
        return str(shapes)
    shape = list(tensor.shape)
    if tensor.layout is torch.strided:
        return str(shape)
    return f"{shape} of {tensor._nnz()}"


def with_same_memory(value: Any) -> Any:
    """A copy of an object, whose tensors and arrays have the memory of the original's; itself if it has no copy.

    What is done to the copy (other attributes, ``requires_grad``) is not done to the original. Changes of numbers in
    place are.
    """
    if is_plain(value):
        return value
    if isinstance(value, Tensor):
        if value.requires_grad:
            return value
        return value.detach()
    if isinstance(value, np.ndarray):
        return value.view()
    # `deepcopy` takes what its memo has for an object as the copy of it: so tensors and arrays keep their memory, and
    # what cannot be taken apart (a lock) is shared.
    shared, silent = _look_into(value)
    memo = {id(part): with_same_memory(part) for part in shared}
    for part in silent:
        memo[id(part)] = part
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever the object's own methods raise: it is used as it is
        return value
