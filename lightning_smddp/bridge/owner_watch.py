"""Attributes of modules, callbacks and their helpers: who has some, and what a run of a step does to them.

An *owner* is an object whose attributes a step may set; its name says where it is, as in ``encoder.layer.0``,
``callback Histogram 0`` or, for a helper, ``encoder->cache.0``: the first member of what ``encoder.cache`` holds.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_smddp._compat.torch import write_count
from lightning_smddp.bridge.step_attributes import MISSING, MOST_MEMBERS, AttrPath, is_plain
from lightning_smddp.pipeline.runtime.remote import RemoteTensor
from lightning_smddp.wire.pytree import leaves, tensors

_OF_MODULES = frozenset(vars(nn.Module()))
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_smddp", "torchmetrics")


@dataclass(frozen=True)
class Found:
    """One change of an owner's attribute: ``grows`` if a list got new members, which are ``after``."""

    where: AttrPath
    before: Any
    after: Any
    grows: bool = False

    @property
    def is_member(self) -> bool:
        """Whether a dict has a new member that is no list."""
        return len(self.where) > 1 and not self.grows and not isinstance(self.after, list)


class OwnerWatch:
    """Remembers an object's attributes, the members of dicts among them, and the lengths of lists."""

    def __init__(self, owner: Any, ignored: frozenset[str]) -> None:
        self.owner = owner
        self.own = vars(owner)
        self.ignored = ignored
        self.before: dict[str, Any] = {}
        self.members: dict[str, dict[Any, Any]] = {}
        self.lengths: dict[AttrPath, tuple[list[Any], int]] = {}
        self.tensors: dict[str, tuple[Tensor, int]] = {}
        for name, value in self.own.items():
            if name in ignored:
                continue
            self.before[name] = value
            if type(value) is list:
                self.lengths[name,] = (value, len(value))
            elif type(value) is Tensor and not value.is_inference():  # of which torch counts no writes
                self.tensors[name] = (value, write_count(value))
            elif isinstance(value, dict) and len(value) <= MOST_MEMBERS:
                self._add_dict(name, value)
        self._values = list(self.own.values())

    def _add_dict(self, name: str, value: dict[Any, Any]) -> None:
        self.members[name] = dict(value)
        for key, member in value.items():
            if type(member) is list:
                self.lengths[name, key] = (member, len(member))

    def is_touched(self) -> bool:
        """Whether anything may have changed: about 0.05 us for each attribute."""
        # It is compared which objects are there, not what is in them: a list tells by its length, and a tensor by how
        # often it was written. What changes deeper inside is not followed.
        if _are_others(self.own.values(), self._values):
            return True
        for name, members in self.members.items():
            now = self.own[name]  # the same dict
            if _are_others(now.values(), members.values()):
                return True
        for known, length in self.lengths.values():
            if len(known) != length:
                return True
        return bool(self.written())

    def written(self) -> list[str]:
        """Attributes whose tensors were written in place."""
        names = []
        for name, (tensor, count) in self.tensors.items():
            if write_count(tensor) != count:
                names.append(name)
        return names

    def numbers(self) -> list[Found]:
        """Changes to values without tensors: numbers, text, and lists of these."""
        return [change for change in self.found() if not tensors(change.after)]

    def found(self) -> list[Found]:
        """All changes so far: lists that grew, attributes that were set, members of dicts that were set.

        Only values that can be followed, see ``is_plain``.
        """
        found = [*self._grown(), *self._assigned(), *self._assigned_in_dicts()]
        return [change for change in found if is_plain(change.after) and _is_key(change.where[-1])]

    def _grown(self) -> Iterator[Found]:
        for where, (known, length) in self.lengths.items():
            tail = known[length:]
            if tail and value_at(self.own, where) is known:  # else another list was set there
                yield Found(where, None, tail, grows=True)

    def _assigned(self) -> Iterator[Found]:
        for name, after in self.own.items():
            before = self.before.get(name, MISSING)
            if name not in self.ignored and after is not before:
                yield Found((name,), before, after)

    def _assigned_in_dicts(self) -> Iterator[Found]:
        for name, members in self.members.items():
            now = self.own.get(name)
            if now is not self.before[name]:  # another dict was set, or none is there any more
                continue
            for key, after in now.items():
                before = members.get(key, MISSING)
                if after is not before:
                    yield Found((name, key), before, after)

    def restore(self, of_members_alone: bool) -> None:
        """Put back lists, numbers, and what has tensors of other stages. This one's stay: they may be caches.

        With ``of_members_alone`` only members of dicts.
        """
        for change in self.found():
            if of_members_alone and not change.is_member:
                continue
            # A tensor that this stage has made may be a cache, which the next run would have to fill again. Numbers and
            # lists are put back, so that each micro-batch begins with what they were before the batch.
            after = change.after
            may_be_cache = bool(tensors(after)) and not isinstance(after, list)
            if not may_be_cache or has_remote(after):
                self.undo(change)

    def undo(self, change: Found) -> None:
        """Put back what ``change``, one of :meth:`found`, has changed: a value, or the length of a list."""
        if change.grows:
            known, length = self.lengths[change.where]
            del known[length:]
        else:
            set_at(self.own, change.where, change.before)


def owners_in(root: nn.Module, with_helpers: bool) -> dict[str, Any]:
    """Modules in ``root``, the Trainer's callbacks, and objects of the user's classes in their attributes, by name.

    Metrics are none of them: they are followed elsewhere.
    """
    owners: dict[str, Any] = {}
    inside: set[int] = set()  # modules in metrics: a wrapper has others in it, and a collection its members
    for name, module in root.named_modules():
        if isinstance(module, (Metric, MetricCollection)):
            inside.update(map(id, module.modules()))
        elif id(module) not in inside:
            owners[name] = module
    trainer = getattr(root, "_trainer", None)
    counts: Counter[str] = Counter()  # of each class: ranks may have other callbacks besides
    for callback in getattr(trainer, "callbacks", ()):
        if not _is_of_a_library(callback):
            kind = type(callback).__qualname__
            owners[f"callback {kind} {counts[kind]}"] = callback
            counts[kind] += 1
    if with_helpers:
        owners |= _helpers(owners)
    return owners


def owner_in_words(name: str) -> str:
    """One of :func:`owners_in`, for messages."""
    name, _, helper = name.partition("->")
    words = "self"
    if name.startswith("callback "):
        words = name.split(" ")[1]
    elif name:
        words += f".{name}"
    attribute, _, index = helper.rpartition(".")
    if attribute:
        words += f".{attribute}"
        if index != "0":
            words += f"[{index}]"
    return words


def _are_others(now: Collection[Any], before: Collection[Any]) -> bool:
    """Whether these are not the same objects in the same order."""
    return len(now) != len(before) or any(map(operator.is_not, now, before))


def has_remote(structure: Any) -> bool:
    """Whether tensors of other stages are in it."""
    return any(type(leaf) is RemoteTensor for leaf in leaves(structure))


def ignored_of(owner: Any) -> frozenset[str]:
    """Names of attributes that are not the user's."""
    if isinstance(owner, nn.Module):
        return _OF_MODULES
    return frozenset()


def _helpers(owners: dict[str, Any]) -> dict[str, Any]:
    """Objects of the user's classes that are attributes of ``owners``, or in lists and dicts of theirs."""
    found: dict[str, Any] = {}
    for name, owner in owners.items():
        ignored = ignored_of(owner)
        for attribute, value in vars(owner).items():
            if attribute in ignored or attribute in ("_trainer", "_fabric"):
                continue
            for index, member in enumerate(_members(value)):
                if _is_helper(member):
                    found[f"{name}->{attribute}.{index}"] = member
    return found


def _is_helper(value: Any) -> bool:
    return hasattr(value, "__dict__") and not _is_of_a_library(value) and not callable(value)


def _members(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value[:MOST_MEMBERS]
    if isinstance(value, dict):
        return list(value.values())[:MOST_MEMBERS]
    return (value,)


def _is_of_a_library(value: Any) -> bool:
    if isinstance(value, (nn.Module, Tensor, type)):
        return True
    return type(value).__module__.partition(".")[0] in (*_LIBRARIES, "builtins", "collections", "numpy")


def _is_key(key: Any) -> bool:
    return isinstance(key, (str, int, nn.Module))


def path_to_json(where: AttrPath, root: nn.Module) -> list[Any] | None:
    """An attribute, and a key of the dict that it is; modules by their names.

    None if a key is a module that is not in ``root``, a metric of a callback's, say: it has no name.
    """
    names = {id(module): name for name, module in root.named_modules()}
    keys = []
    for key in where:
        if not isinstance(key, nn.Module):
            keys.append(["key", key])
        elif id(key) in names:
            keys.append(["module", names[id(key)]])
        else:
            return None
    return keys


def path_from_json(keys: list[Any], root: nn.Module) -> AttrPath:
    """The inverse of :func:`path_to_json`."""
    where = []
    for kind, key in keys:
        if kind == "module":
            where.append(root.get_submodule(key))
        else:
            where.append(key)
    return tuple(where)


def value_at(own: dict[str, Any], where: AttrPath) -> Any:
    """What is at ``where`` of an object's attributes; ``MISSING`` if there is nothing."""
    value = own.get(where[0], MISSING)
    if len(where) == 1 or not isinstance(value, dict):
        return value
    return value.get(where[1], MISSING)


def set_at(own: dict[str, Any], where: AttrPath, value: Any) -> None:
    """Set it, or delete it if ``value`` is ``MISSING``."""
    container = _container(own, where)
    if value is MISSING:
        container.pop(where[-1], None)
    else:
        container[where[-1]] = value


def list_at(own: dict[str, Any], where: AttrPath) -> list[Any]:
    """The list at ``where``, made if there is none."""
    found: list[Any] = _container(own, where).setdefault(where[-1], [])
    return found


def _container(own: dict[str, Any], where: AttrPath) -> Any:
    """The attributes themselves, or the dict among them that has the member."""
    if len(where) == 1:
        return own
    return own[where[0]]
