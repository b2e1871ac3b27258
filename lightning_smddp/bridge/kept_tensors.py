"""Copies that stand in for tensors in attributes while a step runs, as it may change them in place.

``self.hits += (found == y).sum()`` writes into the tensor that the attribute holds. Run once for each micro-batch, each
would see what the one before has written, and only where the operation is done. With a copy instead of the tensor a
change in place is like an assignment of another tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_smddp._compat.torch import storage_key, write_count
from lightning_smddp.wire.pytree import tensors

_SMALL = 2**16  # elements; larger tensors are copied in a trace, and behind it where that has seen a change


@dataclass(frozen=True)
class _StandIn:
    """A tensor of an attribute, the copy that is there in its place, and how often the copy was written at first."""

    original: Tensor
    copy: Tensor
    writes: int

    @property
    def is_changed(self) -> bool:
        return write_count(self.copy) != self.writes


class StandIns:
    """Replaces tensors among an object's attributes by copies.

    Args:
        own: the object's attributes.
        names: which of them may be changed.
        large: names of tensors that are copied however large they are; None: all are.
    """

    def __init__(self, own: dict[str, Any], names: Iterable[str], large: Collection[str] | None) -> None:
        self.own = own
        self._stand_ins: dict[str, _StandIn] = {}
        candidates: dict[str, Tensor] = {}
        for name in names:
            value = own[name]
            if not _can_be_copied(value):
                continue
            if large is None or value.numel() <= _SMALL or name in large:
                candidates[name] = value
        memories = Counter(storage_key(original) for original in candidates.values())
        for name, original in candidates.items():
            # Of two attributes that share memory a write to one shows in the other, which copies would not.
            if memories[storage_key(original)] > 1:
                continue
            with torch.inference_mode(False), torch.no_grad():  # writes to inference tensors are not counted
                copy = original.clone()
            self._stand_ins[name] = _StandIn(original, copy, write_count(copy))
            own[name] = copy

    def changed(self) -> list[str]:
        """Names of what was changed in place."""
        names = []
        for name, stand_in in self._stand_ins.items():
            if stand_in.is_changed and self.own.get(name) is stand_in.copy:
                names.append(name)
        return names

    def have(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of the copies, or a view of one."""
        memory = storage_key(tensor)
        return any(storage_key(stand_in.copy) == memory for stand_in in self._stand_ins.values())

    def is_untouched(self, name: str) -> bool:
        """Whether there is a copy that nobody has changed or replaced."""
        stand_in = self._stand_ins.get(name)
        if stand_in is None:
            return False
        return self.own.get(name) is stand_in.copy and not stand_in.is_changed

    def take_away(self) -> None:
        """Put the originals back where nothing has changed; changed copies are what the step has assigned."""
        for name, stand_in in self._stand_ins.items():
            if self.is_untouched(name):
                self.own[name] = stand_in.original


def _can_be_copied(value: Any) -> bool:
    """Whether a copy is as good as the tensor in all that a step may do with it: no subclass, and not on a graph."""
    if type(value) is not Tensor or value.requires_grad:
        return False
    return value.layout is torch.strided and not value.is_meta


Kept: TypeAlias = dict[str, list[tuple[Tensor, int]]]  # by attribute: tensors, and how often they were written

_OWN = frozenset(vars(nn.Module()))  # torch's attributes of a module, parameters and buffers among them


def tensor_attributes(module: nn.Module) -> Kept:
    """Each attribute of a module in which there are tensors, but parameters and buffers, and which ones."""
    found: Kept = {}
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            continue  # its calls are recorded
        for name, value in vars(part).items():
            if name.startswith("_") and name in _OWN:
                continue
            if not isinstance(value, (Tensor, list, tuple, dict)):
                continue
            written = [(tensor, times_written(tensor)) for tensor in tensors(value)]
            if not written:
                continue
            owner = "self"
            if path:
                owner = f"self.{path}"
            found[f"{owner}.{name}"] = written
    return found


def times_written(tensor: Tensor) -> int:
    """How often ``tensor`` was written in place; torch does not count it of inference tensors."""
    if tensor.is_inference():
        return 0
    return write_count(tensor)


def changed_attributes(before: Kept, now: Kept) -> list[str]:
    """Names of those that have other tensors now, or in which one was written."""
    names = []
    for name, found in now.items():
        if not _same(before.get(name), found):
            names.append(name)
    return names


def _same(before: list[tuple[Tensor, int]] | None, now: list[tuple[Tensor, int]]) -> bool:
    """Whether these are the same objects with the same contents."""
    if before is None or len(before) != len(now):
        return False
    for (one, writes), (other, other_writes) in zip(before, now, strict=True):
        if one is not other or writes != other_writes:
            return False
    return True
