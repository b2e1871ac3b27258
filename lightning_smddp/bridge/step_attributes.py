"""What a step does to its module's attributes: watched for each micro-batch and undone, done once for the batch.

Two things are followed: lists that grow (attributes, and lists that are members of a list or dict), and attributes
that are set to another tensor, number or string (or a structure of these), or hold a tensor that is changed in place.

Each micro-batch starts from what the attributes were before the batch, and what they came to is combined
(``combined_changes.py``)::

    self.rows += len(batch)        0 -> 4, 0 -> 4    8: a count of rows adds up
    self.calls += 1                0 -> 1, 0 -> 1    1: one call for the batch
    self.losses.append(loss)       [2.0], [4.0]      [3.0]: weighted as the loss is
    self.outputs.append(tensor)    4 rows, 4 rows    one tensor of 8 rows
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_smddp.bridge.kept_tensors import StandIns
from lightning_smddp.wire.pytree import leaves, map_leaves

AttrPath: TypeAlias = tuple[Any, ...]  # (attribute,), or (attribute, key or position in it)
MISSING = object()  # what an attribute is that is not there
MOST_MEMBERS = 1000  # of a dict that is followed; one with more is data


@dataclass
class Changes:
    """What one micro-batch appended to which list, and what it set attributes to, with what they were."""

    appended: dict[AttrPath, list[Any]] = field(default_factory=dict)
    values: dict[AttrPath, tuple[Any, Any]] = field(default_factory=dict)  # (before, after)
    in_place: frozenset[AttrPath] = frozenset()  # of values: tensors that were written, of the shape that they had


class AttributeWatch:
    """Remembers a module's attributes until :meth:`undo`.

    Args:
        module: whose attributes.
        ignored: names that are left alone.
        in_place: names of tensors that earlier runs were seen to change in place; gains those of this one.
        is_trace: whether any tensor is watched for such changes, not only small ones and those.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[str],
        in_place: set[str],
        is_trace: bool,
    ) -> None:
        self.own = vars(module)
        self.kind = type(module)
        self.ignored = ignored
        self.in_place = in_place
        self.attributes = {name: value for name, value in self.own.items() if name not in ignored}
        self.lengths = {where: (found, len(found)) for where, found in self._lists()}
        large: Collection[str] | None = in_place
        if is_trace:
            large = None
        self._stand_ins = StandIns(self.own, self.attributes, large)

    def growth(self) -> dict[AttrPath, list[Any]]:
        """What lists have gained: their new members, by the list's path."""
        tails = {}
        for where, found in self._lists():
            known, length = self.lengths.get(where, (found, 0))
            if known is not found or len(found) <= length:
                continue
            # A list that is itself new in a list is in the tail of that one already.
            is_new_member = where not in self.lengths and len(where) > 1
            if is_new_member and isinstance(self.own[where[0]], list):
                continue
            tails[where] = found[length:]
        return tails

    def assigned(self) -> list[Any]:
        """What attributes were set to, or hold that was changed in place."""
        self.in_place.update(self._stand_ins.changed())
        found = []
        for name, value in self.own.items():
            if name in self.ignored or value is self.attributes.get(name, MISSING):
                continue
            # An untouched copy is another object than the attribute was, and yet nothing that the step has assigned.
            if name in self.in_place or not self._stand_ins.is_untouched(name):
                found.append(value)
        return found

    def stands_in(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with a copy that replaces one of the attributes' tensors."""
        return self._stand_ins.have(tensor)

    def settle(self, assigned: Mapping[int, Tensor]) -> None:
        """Let tensors that another stage has changed be what they are here, by id of those :meth:`assigned`."""
        # The tensor given for one is on its memory where this stage has written it; one that was sent here is not.
        for name in self.in_place & self.own.keys():
            here = self.own[name]
            after = assigned.get(id(here))
            if after is not None and after.data_ptr() != here.data_ptr():
                self.own[name] = after

    def undo(self) -> Changes:
        """Put the attributes back, and say what had changed."""
        self.in_place.update(self._stand_ins.changed())
        self._stand_ins.take_away()
        changes = Changes(appended=self.growth())
        for where in changes.appended:
            self._cut(where)
        # From here on lists are as long as they were: what is another object now was set, not appended to.
        for name, after in list(self.own.items()):
            before = self.attributes.get(name, MISSING)
            if name in self.ignored or after is before or not is_plain(after):
                continue
            self._note(changes, name, before, after)
            if before is MISSING:
                del self.own[name]
            else:
                self.own[name] = before
        return changes

    def _note(self, changes: Changes, name: str, before: Any, after: Any) -> None:
        """Add to ``changes`` that an attribute was set."""
        if type(after) is list and type(before) is list and _begins_with(after, before):
            changes.appended[name,] = after[len(before) :]  # `self.list = self.list + [item]`
            return
        was = before
        if before is MISSING:  # `self.count += 1` reads the class's `count` the first time
            was = getattr(self.kind, name, MISSING)
        changes.values[name,] = (was, after)
        are_tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
        if are_tensors and name in self.in_place and before.shape == after.shape:
            changes.in_place |= {(name,)}

    def _lists(self) -> Iterator[tuple[AttrPath, list[Any]]]:
        """Lists among the attributes and one level below, but in attributes that were set since the watch began."""
        for name, value in self.own.items():
            # Another list or dict than before was assigned, however it begins: that is for `undo` to say.
            if name in self.ignored or self.attributes.get(name, value) is not value:
                continue
            members: Any = ()
            if type(value) is list:
                yield (name,), value
                if value and type(value[0]) is list:
                    members = enumerate(value)
            elif isinstance(value, dict) and len(value) <= MOST_MEMBERS:
                members = value.items()
            for key, member in members:
                if type(member) is list:
                    yield (name, key), member

    def _cut(self, where: AttrPath) -> None:
        """Take from a list what it has gained; a list that is new goes as a whole."""
        found, length = self.lengths.get(where, (None, 0))
        if found is not None:
            del found[length:]
        elif len(where) == 1:
            del self.own[where[0]]
        else:
            del self.own[where[0]][where[1]]


def apply_changes(module: nn.Module, appended: Sequence[tuple[AttrPath, list[Any]]], values: Mapping[str, Any]) -> None:
    """Do to ``module`` what the batch did."""
    own = vars(module)
    own.update(values)
    for where, tail in appended:
        if len(where) == 1:
            own.setdefault(where[0], []).extend(tail)
        elif isinstance(own.get(where[0]), dict):
            own[where[0]].setdefault(where[1], []).extend(tail)
        else:
            own[where[0]][where[1]].extend(tail)


def detached(structure: Any) -> Any:
    """``structure`` with its tensors off the graph; those that are stay the objects that they are."""

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return leaf.detach()
        return leaf

    return map_leaves(detach, structure)


def is_plain(structure: Any) -> bool:
    """Whether an attribute that is set to it can be followed: of tensors, numbers, text and None."""
    return all(leaf is None or isinstance(leaf, (Tensor, numbers.Number, str)) for leaf in leaves(structure))


def in_words(owner: str, where: AttrPath) -> str:
    """An attribute, or a member of a dict that is one, as code would have it."""
    keys = [f"[{key!r}]" for key in where[1:]]
    return f"{owner}.{where[0]}{''.join(keys)}"


def _begins_with(longer: list[Any], shorter: list[Any]) -> bool:
    return len(longer) >= len(shorter) and all(map(operator.is_, longer, shorter))
