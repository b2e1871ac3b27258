"""Numbers that Python read from tensors of earlier stages: one message for all of a micro-batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.pipeline.capture.graph import Node
from lightning_smddp.pipeline.runtime.remote import ReplayError
from lightning_smddp.wire.encode import bits_of, float_of
from lightning_smddp.wire.pytree import leaves, rebuild


def count(items: Sequence[Node]) -> int:
    """How many numbers are read at ``items``."""
    return sum(len(item.returned.sources) for item in items)


def write_told(items: Sequence[Node], results: Mapping[int, Any], device: torch.device) -> Tensor:
    """What was read at each of ``items``, as one tensor."""
    numbers = []
    for item in items:
        for leaf, (_, traced) in zip(leaves(results[item.index]), item.returned.sources, strict=True):
            if type(leaf) is not type(traced):
                raise ReplayError(
                    f"At {item.location} Python read {leaf!r}, a {type(leaf).__name__}; when the step was traced "
                    f"it was a {type(traced).__name__}."
                )
            numbers.append(_bits(leaf))
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def read_told(items: Sequence[Node], message: Tensor) -> dict[int, Any]:
    """The inverse of :func:`write_told`, by item."""
    numbers = iter(message.tolist())
    results = {}
    for item in items:
        found = [_number(next(numbers), source) for _, source in item.returned.sources]
        results[item.index] = rebuild(item.returned.skeleton, found)
    return results


def _bits(number: Any) -> int:
    return bits_of(number) if isinstance(number, float) else int(number)


def _number(bits: int, traced: Any) -> Any:
    """Of the kind that it was when the step was traced."""
    return float_of(bits) if isinstance(traced, float) else type(traced)(bits)
