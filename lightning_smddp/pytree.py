"""Nested structures of any kind, as batches and outputs of modules are: taken apart, and put together again.

``torch.utils._pytree`` is private, slower, and refuses types that nobody registered; here every mapping, sequence and
dataclass is a container, so that a ``BatchEncoding`` or a ``ModelOutput`` comes back as what it was.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

Path: TypeAlias = tuple[str | int, ...]
Members: TypeAlias = list[tuple[str | int, Any]]

_LEAF_TYPES: set[type] = set()  # that were met: asking all over what a type is would be slow


def leaves(structure: Any) -> list[Any]:
    """What is in ``structure`` and is no container, in order."""
    found: list[Any] = []
    _collect(structure, found)
    return found


def tensors(structure: Any) -> list[Tensor]:
    """The tensors in ``structure``, in order."""
    return [leaf for leaf in leaves(structure) if isinstance(leaf, Tensor)]


def items(structure: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf with its keys and positions from the outside in."""
    members = members_of(structure)
    if members is None:
        yield path, structure
    for key, member in members or ():
        yield from items(member, (*path, key))


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """A copy of ``structure`` with ``function`` applied to each leaf, in order."""
    kind = type(structure)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, member) for member in structure])
    members = members_of(structure)
    if members is None:
        return function(structure)
    return with_members(structure, [(key, map_leaves(function, member)) for key, member in members])


def map_tensors(function: Callable[[Any], Any], structure: Any) -> Any:
    """A copy of ``structure`` with ``function`` applied to each tensor, in order."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, structure)


def copied(structure: Any) -> Any:
    """A copy of ``structure``, and of the tensors in it."""
    return map_tensors(Tensor.clone, structure)


def detached(structure: Any) -> Any:
    """``structure`` with its tensors off the graph."""
    return map_tensors(Tensor.detach, structure)


def with_members(container: Any, values: Members) -> Any:
    """A copy of ``container`` with other members, of the same keys and number unless it is a list or tuple."""
    if type(container) is dict:
        return dict(values)
    if isinstance(container, (list, tuple)):
        plain = [value for _, value in values]
        if hasattr(container, "_fields"):  # a named tuple takes its members one by one
            return type(container)(*plain)
        return type(container)(plain)
    changed = copy.copy(container)
    for key, value in values:
        if isinstance(container, Mapping):
            changed[key] = value
        else:  # a dataclass, which may be frozen
            object.__setattr__(changed, str(key), value)
    return changed


def _collect(structure: Any, found: list[Any]) -> None:
    """Called for every argument of every operation of a step: so the usual types first."""
    kind = type(structure)
    if kind in _LEAF_TYPES:
        found.append(structure)
    elif kind is tuple or kind is list:
        for member in structure:
            if type(member) in _LEAF_TYPES:
                found.append(member)
            else:
                _collect(member, found)
    elif kind is dict:
        for member in structure.values():
            _collect(member, found)
    else:
        members = members_of(structure)
        if members is None:
            found.append(structure)
        for _, member in members or ():
            _collect(member, found)


def members_of(structure: Any) -> Members | None:
    """Keys and members of a container; None for a leaf."""
    kind = type(structure)
    if kind in _LEAF_TYPES:
        return None
    if isinstance(structure, Mapping):
        return list(structure.items())
    if isinstance(structure, (list, tuple)):
        return list(enumerate(structure))
    if dataclasses.is_dataclass(kind):
        return [(field.name, getattr(structure, field.name)) for field in dataclasses.fields(structure)]
    _LEAF_TYPES.add(kind)
    return None
