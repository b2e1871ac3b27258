"""Copies that stand in for tensors in attributes while a step runs, as it may change them in place.

``self.hits += (found == y).sum()`` writes into the tensor that the attribute holds. Run once for each micro-batch, each
would see what the one before has written, and only where the operation is done. With a copy instead of the tensor a
change in place is like an assignment of another tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_smddp._compat.torch import storage_key, write_count
from lightning_smddp.wire.pytree import tensors

_SMALL = 2**16  # elements; larger tensors are copied where a trace has seen a change


@dataclass(frozen=True)
class _StandIn:
    original: Tensor
    copy: Tensor
    writes: int

    @property
    def is_changed(self) -> bool:
        return write_count(self.copy) != self.writes


class StandIns:
    """Replaces tensors in one container by copies.

    Args:
        container: attributes of an object, or a dict among them.
        keys: which members may be changed.
        is_sought: whether a key's tensor is copied however large it is.
    """

    def __init__(self, container: dict[Any, Any], keys: Iterable[Hashable], is_sought: Callable[[Any], bool]) -> None:
        self.container = container
        self._stand_ins: dict[Any, _StandIn] = {}
        candidates = {key: container[key] for key in keys if _can_be_copied(container[key])}
        candidates = {key: found for key, found in candidates.items() if found.numel() <= _SMALL or is_sought(key)}
        memories = Counter(map(storage_key, candidates.values()))
        for key, found in candidates.items():
            if memories[storage_key(found)] > 1:
                continue  # a change of one shows in the other
            with torch.inference_mode(False), torch.no_grad():  # writes to inference tensors are not counted
                copy = found.clone()
            self._stand_ins[key] = _StandIn(found, copy, write_count(copy))
            container[key] = copy

    def changed(self) -> list[Any]:
        """Keys of what was changed in place."""
        return [key for key, one in self._stand_ins.items() if one.is_changed and self.container.get(key) is one.copy]

    def have(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of the copies, or a view of one."""
        memory = storage_key(tensor)
        return any(storage_key(one.copy) == memory for one in self._stand_ins.values())

    def is_untouched(self, key: Any) -> bool:
        """Whether there is a copy that nobody has changed or replaced."""
        one = self._stand_ins.get(key)
        return one is not None and self.container.get(key) is one.copy and not one.is_changed

    def take_away(self) -> None:
        """Put the originals back where nothing has changed; changed copies are what the step has assigned."""
        for key, one in self._stand_ins.items():
            if self.container.get(key) is one.copy and not one.is_changed:
                self.container[key] = one.original


def _can_be_copied(value: Any) -> bool:
    return type(value) is Tensor and not value.requires_grad and value.layout is torch.strided and not value.is_meta


Kept: TypeAlias = dict[str, list[tuple[Tensor, int]]]  # by attribute: tensors, and how often they were written

_OWN = frozenset(vars(nn.Module()))


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
            written = [(tensor, _writes(tensor)) for tensor in tensors(value)]
            if written:
                found[".".join(["self", *filter(None, path.split(".")), name])] = written
    return found


def _writes(tensor: Tensor) -> int:
    """How often ``tensor`` was written in place; torch does not count it of inference tensors."""
    if tensor.is_inference():
        return 0
    return write_count(tensor)


def changed_attributes(before: Kept, now: Kept) -> list[str]:
    """Names of those that have other tensors now, or in which one was written."""
    return [name for name, found in now.items() if not _same(before.get(name), found)]


def _same(before: list[tuple[Tensor, int]] | None, now: list[tuple[Tensor, int]]) -> bool:
    """Whether these are the same objects with the same contents."""
    if before is None or len(before) != len(now):
        return False
    for (one, writes), (other, other_writes) in zip(before, now, strict=True):
        if one is not other or writes != other_writes:
            return False
    return True
