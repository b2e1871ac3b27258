"""Tensors that a module keeps in attributes, beside its parameters and buffers."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_smddp._compat.torch import write_count
from lightning_smddp.pipeline.capture.pytree import tensors

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
            inside = tensors(value) if isinstance(value, (Tensor, list, tuple, dict)) else []
            if inside:
                written = [(tensor, 0 if tensor.is_inference() else write_count(tensor)) for tensor in inside]
                found[".".join(["self", *filter(None, path.split(".")), name])] = written
    return found


def changed_attributes(before: Kept, now: Kept) -> list[str]:
    """Names of those that have other tensors now, or in which one was written."""
    return [name for name, found in now.items() if not _same(before.get(name), found)]


def _same(before: list[tuple[Tensor, int]] | None, now: list[tuple[Tensor, int]]) -> bool:
    """Whether these are the same objects with the same contents."""
    if before is None or len(before) != len(now):
        return False
    return all(
        one is other and writes == other_writes
        for (one, writes), (other, other_writes) in zip(before, now, strict=True)
    )
