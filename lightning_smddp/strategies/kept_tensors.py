"""Tensors that a module keeps in attributes, beside its parameters and buffers."""

from __future__ import annotations

import operator

from torch import Tensor, nn

from lightning_smddp.pipeline.structure import tensors

_OWN = frozenset(vars(nn.Module()))


def tensor_attributes(module: nn.Module) -> dict[str, list[Tensor]]:
    """Each attribute of a module in which there are tensors, but parameters and buffers, and which ones."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_") and name in _OWN:
                continue
            inside = tensors(value) if isinstance(value, (Tensor, list, tuple, dict)) else []
            if inside:
                found[".".join(["self", *filter(None, path.split(".")), name])] = inside
    return found


def changed_attributes(before: dict[str, list[Tensor]], now: dict[str, list[Tensor]]) -> list[str]:
    """Names of those that have other tensors now."""
    return [name for name, found in now.items() if not _same(before.get(name), found)]


def _same(before: list[Tensor] | None, now: list[Tensor]) -> bool:
    """Whether these are the same objects."""
    return before is not None and len(before) == len(now) and all(map(operator.is_, before, now))
