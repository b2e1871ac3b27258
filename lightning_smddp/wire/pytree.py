"""Nested structures of any kind, as batches and outputs of modules are: taken apart, and put together again.

``torch.utils._pytree`` is private and refuses types that nobody registered; here every mapping, sequence and dataclass
is a container, so that a ``BatchEncoding`` or a ``ModelOutput`` comes back as what it was.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

Path: TypeAlias = tuple[str | int, ...]
Members: TypeAlias = list[tuple[str | int, Any]]

# The usual types of leaves; others may be added. A set finds them faster than checks of what is no container.
LEAF_TYPES: set[type] = {Tensor, nn.Parameter, int, float, bool, str, type(None)}


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
    children = members_of(structure)
    if children is None:
        yield path, structure
    else:
        for key, child in children:
            yield from items(child, (*path, key))


def rebuild(structure: Any, new_leaves: Sequence[Any]) -> Any:
    """A copy of ``structure`` with ``new_leaves`` in place of its :func:`leaves`; containers keep their types."""
    iterator = iter(new_leaves)  # `map_leaves` comes to the leaves in the order of `leaves`
    return map_leaves(lambda _: next(iterator), structure)


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """A copy of ``structure`` with ``function`` applied to each leaf, in order."""
    if type(structure) in LEAF_TYPES:
        return function(structure)
    children = members_of(structure)
    if children is None:
        return function(structure)
    changed = [(key, map_leaves(function, child)) for key, child in children]
    return with_members(structure, changed)


def copied(structure: Any) -> Any:
    """A copy of ``structure``, and of the tensors in it."""

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.clone()
        return leaf

    return map_leaves(copy_of, structure)


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
    """Called for every argument of every operation of a step: the usual types first, as checks of others are slow."""
    kind = type(structure)
    if kind in LEAF_TYPES:
        found.append(structure)
    elif kind is tuple or kind is list:
        for child in structure:
            _collect(child, found)
    elif kind is dict:
        for child in structure.values():
            _collect(child, found)
    else:
        children = members_of(structure)
        if children is None:
            found.append(structure)
            return
        for _, child in children:
            _collect(child, found)


def members_of(structure: Any) -> Members | None:
    """Keys and members of a container; None for a leaf."""
    if isinstance(structure, Mapping):
        return list(structure.items())
    if isinstance(structure, (list, tuple)):
        return list(enumerate(structure))
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        return [(field.name, getattr(structure, field.name)) for field in dataclasses.fields(structure)]
    return None
