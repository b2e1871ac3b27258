"""What a step has done to attributes of objects: looked at before and behind it, put back, and done again elsewhere."""

from __future__ import annotations

import numbers
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import write_count
from lightning_smddp.bridge.owners import Place, owner_named
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.wire.pytree import leaves

MOST_MEMBERS = 1000  # of a container that is copied; of a longer list only what it gains, of others nothing
_CONTAINERS = (list, dict, set, deque)
_MISSING = object()  # what an attribute is that is not there
_PLAIN = (Tensor, numbers.Number, str, np.ndarray, np.generic)

Owners: TypeAlias = Mapping[str, dict[str, Any]]  # attributes of objects, by the objects' names
Follows: TypeAlias = Callable[[str, str], bool]  # whether an owner's attribute is looked at

Change: TypeAlias = tuple[Place, str, Any]
"""What was done where: ``set`` to a value, ``delete`` (None), ``write`` in place (a tensor), ``extend`` by a list, or
``members``: a container has these now."""


class Snapshot:
    """Attributes of some objects at one time, and what is in the containers among them.

    Args:
        owners: whose attributes.
        follows: which of them.
        starts: from which position on long lists are looked at, by their ids; None: from their present end on.

    Attributes:
        attributes: by owner.
        members: by place, a container, and a copy of its members; of a long list only from a position on.
    """

    def __init__(self, owners: Owners, follows: Follows, starts: dict[int, int] | None = None) -> None:
        self.owners = owners
        self.follows = follows
        self.attributes: dict[str, dict[str, Any]] = {}
        self.members: dict[Place, tuple[Any, int, Any]] = {}
        self._is_first = starts is None
        self._starts = starts or {}
        for name, own in owners.items():
            kept = {attribute: value for attribute, value in own.items() if follows(name, attribute)}
            self.attributes[name] = kept
            for attribute, value in kept.items():
                self._look_into((name, attribute), value)

    def current(self) -> Snapshot:
        """The same attributes as they are now."""
        return Snapshot(self.owners, self.follows, self._starts)

    def _look_into(self, place: Place, container: Any) -> None:
        is_long = isinstance(container, _CONTAINERS) and len(container) > MOST_MEMBERS
        if not isinstance(container, _CONTAINERS) or (is_long and not isinstance(container, list)):
            return
        if self._is_first and is_long:
            self._starts[id(container)] = len(container)
        start = self._starts.get(id(container), 0)
        members: Any = container[start:] if isinstance(container, list) else container.copy()
        self.members[place] = (container, start, members)
        if len(place) == 2 and not isinstance(container, set) and len(members) <= MOST_MEMBERS:
            for key, member in _items(members):
                self._look_into((*place, key), member)

    def put_back(self, follows: Follows | None = None) -> None:
        """Let attributes be so again, or these of them. Containers that are as they were are not written."""
        follows = follows or self.follows
        for name, kept in self.attributes.items():
            own = self.owners[name]
            for attribute in [other for other in own if other not in kept and follows(name, other)]:
                del own[attribute]
            own.update((attribute, value) for attribute, value in kept.items() if follows(name, attribute))
        for place, (container, start, members) in self.members.items():
            is_same = len(container) == start + len(members) and _begins_with(container, members, start)
            if not is_same and follows(*place[:2]):
                _set_members(container, start, members)

    def changes_to(self, now: Snapshot, copies: Mapping[Place, Tensor]) -> Iterator[Change]:
        """How ``now`` came to be. ``copies`` stood for tensors, to see which of these are written in place."""
        for name, kept in now.attributes.items():
            yield from _changed_items((name,), self.attributes[name], kept, copies)
        for place, (container, _, members) in now.members.items():
            known, _, before = self.members.get(place, (None, 0, None))
            if known is not container:
                continue  # it is in what was set
            if isinstance(container, dict):
                yield from _changed_items(place, before, members, copies)
                continue
            is_begin = len(members) >= len(before) and _begins_with(members, before)
            if is_begin and len(members) > len(before) and isinstance(container, list):
                yield place, "extend", members[len(before) :]
            elif not is_begin or len(members) > len(before):
                yield place, "members", list(members)

    def tensors(self) -> Iterator[tuple[Place, Tensor]]:
        """Tensors that are attributes, or members of containers in these."""
        for name, kept in self.attributes.items():
            for attribute, value in kept.items():
                if type(value) is Tensor:
                    yield (name, attribute), value
        for place, (_, _, members) in self.members.items():
            if isinstance(members, dict):
                for key, value in members.items():
                    if type(value) is Tensor:
                        yield (*place, key), value


def apply_changes(root: nn.Module, changes: Iterable[Change]) -> None:
    """Do them to the objects here; owners that this rank lacks, such as another rank's callback, are left out."""
    for place, kind, value in changes:
        own = container_of(root, place)
        if own is None:
            continue
        last = place[-1]
        if kind == "set":
            own[last] = value
        elif kind == "delete":
            own.pop(last, None)
        elif kind == "extend":
            own[last].extend(value)
        elif kind == "members":
            _set_members(own[last], 0, value)
        else:
            with torch.no_grad():
                own[last].copy_(value)


def container_of(root: nn.Module, place: Place) -> Any:
    """What has the last key of ``place``: an object's attributes, or a container in one; None if it is not there."""
    owner = owner_named(root, place[0])
    if owner is None:
        return None
    container: Any = vars(owner)
    for key in place[1:-1]:
        container = container[key]
    return container


def is_plain(place: Place, value: Any) -> bool:
    """Whether other ranks can be told that ``value`` is there: of tensors, numbers, text and None."""
    if not all(isinstance(key, (str, int)) for key in place):
        return False
    for leaf in leaves(value):
        if isinstance(leaf, RemoteTensor) or not (leaf is None or isinstance(leaf, _PLAIN)):
            return False
    return True


def _changed_items(place: Place, before: dict[Any, Any], now: dict[Any, Any], copies: Any) -> Iterator[Change]:
    for key, value in now.items():
        if value is before.get(key, _MISSING):
            continue
        where = (*place, key)
        if copies.get(where, _MISSING) is not value:
            yield where, "set", value
        elif isinstance(value, RemoteTensor) or write_count(value):  # another stage has written into it, or this one
            yield where, "write", value
    for key in before:
        if key not in now:
            yield (*place, key), "delete", None


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return container.items()
    return enumerate(container)


def _begins_with(container: Any, members: Any, start: int = 0) -> bool:
    """Whether the very objects ``members`` are in the container, from a position on."""
    if isinstance(container, set):
        return bool(container >= members)
    if isinstance(container, dict):
        return _are_same(container, members) and _are_same(container.values(), members.values())
    return _are_same(islice(container, start, None), members)


def _are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(operator.is_, some, others))


def _set_members(container: Any, start: int, members: Any) -> None:
    if isinstance(container, list):
        container[start:] = members
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(members)
    else:
        container.update(members)
