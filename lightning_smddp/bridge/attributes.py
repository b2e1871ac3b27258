"""Attributes of objects that a step may change: looked at before and behind it, put back, and done again elsewhere.

The objects, called owners, are modules, and the user's objects in attributes of these. Where something is says its
*place*: the name of a module (empty for the LightningModule), then attributes and keys::

    ("", Attribute("calls"))                          self.calls
    ("encoder", Attribute("cache"), "k")              self.encoder.cache["k"]
    ("", Attribute("meters"), 0, Attribute("sum"))    self.meters[0].sum
"""

from __future__ import annotations

import numbers
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_smddp._compat.torch import write_count
from lightning_smddp.pipeline.capture.preserve_state import refill
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.pytree import leaves

ROOT = ("",)  # the place of the LightningModule
NOT_OF_USERS = frozenset(vars(nn.Module())) | {"_trainer", "_fabric"}  # attributes of modules: parameters, hooks
_MOST_MEMBERS = 1000  # of a container that is looked through; of a longer list only its end is
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (Tensor, numbers.Number, str, np.ndarray, np.generic, type(None))
_LIBRARIES = {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_smddp", "torchmetrics", "builtins",
    "collections", "numpy",
}  # fmt: skip

Place: TypeAlias = tuple[Any, ...]
Contents: TypeAlias = dict[Place, Any]
"""Members of containers, by place: a dict, list, set or deque. Those of an owner are its attributes."""

Copies: TypeAlias = dict[int, tuple[Place, Tensor]]
"""That stand for tensors which are written in place, by id, with the place of each."""


class Attribute(str):
    """The name of an attribute in a place; all else in it are keys of dicts, and positions."""

    __slots__ = ()


class Members(NamedTuple):
    """What a list has from a position on; what a set or deque has."""

    start: int
    members: list[Any]


class Deleted:
    """Itself what is at a place where nothing is any more."""


class Change(NamedTuple):
    """What is at a place now.

    Attributes:
        place: where.
        value: that is there; or ``Members`` or ``Deleted``.
        is_written: a tensor is the same object as before, with these numbers: whoever else holds it sees them.
    """

    place: Place
    value: Any
    is_written: bool = False


# ---- places ----------------------------------------------------------------------------------------------------------


def owners_in(root: nn.Module) -> dict[Place, Any]:
    """All of them. Metrics, and modules in these, are none: see ``metrics.py``."""
    metrics = [module for module in root.modules() if isinstance(module, (Metric, MetricCollection))]
    left_out = {module for metric in metrics for module in metric.modules()}
    modules: dict[Place, Any] = {(name,): module for name, module in root.named_modules(left_out)}
    owners = dict(modules)
    for place, module in modules.items():
        for attribute, value in vars(module).items():
            where = (*place, Attribute(attribute))
            for there, found in [(where, value), *(((*where, key), member) for key, member in _members(value))]:
                if attribute not in NOT_OF_USERS and _is_helper(found):
                    owners[there] = found
    return owners


def object_at(root: nn.Module, place: Place) -> Any:
    """What is there; None if nothing is."""
    found: Any = root.get_submodule(place[0])
    for key in place[1:]:
        members = getattr(found, "__dict__", {}) if isinstance(key, Attribute) else dict(_members(found))
        found = members.get(key)
    return found


def slot_at(root: nn.Module, place: Place) -> tuple[Any, Any]:
    """An owner's attributes, or a container, and the key in it; None for the former if it is not there."""
    found = object_at(root, place[:-1])
    key = place[-1]
    if isinstance(key, Attribute):
        return getattr(found, "__dict__", None), str(key)
    return found, key


def owner_of(place: Place) -> Place:
    """The place of the owner in whose attribute it is."""
    return place[:-1] if isinstance(place[-1], Attribute) else owner_of(place[:-1])


def in_words(place: Place) -> str:
    """A place as code would have it."""
    keys = [f".{key}" if isinstance(key, Attribute) else f"[{key!r}]" for key in place[1:]]
    return f"self.{place[0]}".rstrip(".") + "".join(keys)


def _members(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return islice(container.items(), _MOST_MEMBERS)
    if isinstance(container, (list, tuple, deque)):
        return islice(enumerate(container), _MOST_MEMBERS)
    return ()


def _is_helper(value: Any) -> bool:
    """Whether it is an object of a class of the user's."""
    if callable(value) or isinstance(value, (Tensor, *_CONTAINERS)):
        return False
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _LIBRARIES


# ---- changes ---------------------------------------------------------------------------------------------------------


class Watch:
    """Attributes of some objects, and what is in the containers among them, from one time on.

    Args:
        owners: the objects, by place.
        ignored: attributes of the LightningModule that are not looked at; of others these are torch's.

    Attributes:
        before: what they were at that time.
    """

    def __init__(self, owners: Mapping[Place, Any], ignored: frozenset[str]) -> None:
        # By place a container, the position from which on a list is looked at, and what is ignored of an owner.
        self._containers: dict[Place, tuple[Any, int, frozenset[str]]] = {}
        for place, owner in owners.items():
            not_of_users = ignored if place == ROOT else NOT_OF_USERS
            self._containers[place] = vars(owner), 0, not_of_users
            for attribute, value in vars(owner).items():
                if attribute not in not_of_users:
                    where = (*place, Attribute(attribute))
                    self._add(where, value)
                    for key, member in _members(value):
                        self._add((*where, key), member)
        self.before = self.now()

    def _add(self, place: Place, value: Any) -> None:
        if isinstance(value, list):
            self._containers[place] = value, max(0, len(value) - _MOST_MEMBERS), frozenset()
        elif isinstance(value, _CONTAINERS) and len(value) <= _MOST_MEMBERS:
            self._containers[place] = value, 0, frozenset()

    def now(self) -> Contents:
        """What they are now."""
        found: Contents = {}
        for place, (container, start, ignored) in self._containers.items():
            if isinstance(container, dict):
                found[place] = {key: value for key, value in container.items() if key not in ignored}
            else:
                found[place] = container[start:] if isinstance(container, list) else container.copy()
        return found

    def put_back(self, contents: Contents) -> None:
        """Let them be so again."""
        for place, members in contents.items():
            container, start, ignored = self._containers[place]
            if not isinstance(container, dict):
                _set_members(container, start, members)
                continue
            for key in container.keys() - members.keys() - ignored:
                del container[key]
            dict.update(container, members)  # of whatever class: one may refuse to be changed

    def changes(self, contents: Contents, copies: Copies) -> Iterator[Change]:
        """How ``contents`` came to be. ``copies`` stood for tensors, to see which of these are written in place."""
        replaced: set[Place] = set()
        for place, members in contents.items():
            before = self.before[place]
            container, start, _ = self._containers[place]
            if _are_same(members, before) or place in replaced or place[:-1] in replaced:
                continue  # the last two: it is in what was set
            if isinstance(container, dict):
                for key in {**before, **members}:
                    value = members.get(key, Deleted)
                    if value is before.get(key, Deleted):
                        continue
                    where = self._where(place, key)
                    if id(value) not in copies or copies[id(value)][0] != where:
                        replaced.add(where)
                        yield Change(where, value)
                    elif isinstance(value, RemoteTensor) or write_count(value):  # another stage has written, or this
                        yield Change(where, value, is_written=True)
                continue
            known = 0
            if isinstance(container, list) and _are_same(members[: len(before)], before):
                known = len(before)
            else:
                replaced.add(place)
            yield Change(place, Members(start + known, list(members)[known:]))

    def tensors(self) -> Iterator[Place]:
        """Where tensors are, as attributes or in dicts."""
        for place, members in self.before.items():
            if isinstance(members, dict):
                yield from (self._where(place, key) for key, value in members.items() if type(value) is Tensor)

    def _where(self, place: Place, key: Any) -> Place:
        is_owner = self._containers[place][2]
        return (*place, Attribute(key) if is_owner else key)


def apply_changes(root: nn.Module, changes: Iterable[Change]) -> None:
    """Do them to the objects here; owners that this rank lacks are left out."""
    for place, value, is_written in changes:
        container, key = slot_at(root, place)
        if container is None:
            continue
        if isinstance(value, Members):
            _set_members(container[key], value.start, value.members)
        elif is_written:
            with torch.no_grad():
                container[key].copy_(value)
        elif value is Deleted:
            container.pop(key, None)
        else:
            container[key] = value


def is_plain(change: Change) -> bool:
    """Whether other ranks can be told of it: there are tensors, numbers, text and None."""
    are_plain = all(isinstance(leaf, _PLAIN) or leaf is Deleted for leaf in leaves(change.value))
    return are_plain and all(isinstance(key, (str, int)) for key in change.place)


def copies_at(root: nn.Module, places: Iterable[Place]) -> Copies:
    """Let copies stand for tensors that are written in place, and return them."""
    copies: Copies = {}
    for place in places:
        container, key = slot_at(root, place)
        value = None if container is None else container.get(key)
        if type(value) is Tensor and not value.requires_grad and not value.is_meta:
            with torch.inference_mode(False), torch.no_grad():  # writes to inference tensors are not counted
                copy = container[key] = value.clone()
            copies[id(copy)] = place, copy
    return copies


def _are_same(some: Any, others: Any) -> bool:
    """Whether two containers have the very same objects."""
    if isinstance(some, set):
        return bool(some == others)
    if isinstance(some, dict):
        return list(some) == list(others) and all(map(operator.is_, some.values(), others.values()))
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _set_members(container: Any, start: int, members: Iterable[Any]) -> None:
    if isinstance(container, list):
        container[start:] = members
    else:
        refill(container, members)
