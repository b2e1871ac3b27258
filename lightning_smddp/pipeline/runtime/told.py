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


def count(nodes: Sequence[Node]) -> int:
    """How many numbers are read at ``nodes``."""
    return sum(len(node.returned.sources) for node in nodes)


def write_told(nodes: Sequence[Node], results: Mapping[int, Any], device: torch.device) -> Tensor:
    """What was read at each of ``nodes``, as one tensor."""
    # Every number travels as 64 bits, floats by their bit pattern: one tensor for all kinds, and nothing is rounded.
    # How many there are and of which kind, the receiver knows from the trace.
    numbers = []
    for node in nodes:
        for leaf, (_, traced) in zip(leaves(results[node.index]), node.returned.sources, strict=True):
            if type(leaf) is not type(traced):
                raise ReplayError(
                    f"At {node.location} Python read {leaf!r}, a {type(leaf).__name__}; when the step was traced "
                    f"it was a {type(traced).__name__}."
                )
            numbers.append(_bits(leaf))
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def read_told(nodes: Sequence[Node], message: Tensor) -> dict[int, Any]:
    """The inverse of :func:`write_told`, by node."""
    numbers = iter(message.tolist())
    results = {}
    for node in nodes:
        found = [_number(next(numbers), source) for _, source in node.returned.sources]
        results[node.index] = rebuild(node.returned.skeleton, found)
    return results


def _bits(number: Any) -> int:
    if isinstance(number, float):
        return bits_of(number)
    return int(number)


def _number(bits: int, traced: Any) -> Any:
    """Of the kind that it was when the step was traced."""
    if isinstance(traced, float):
        return float_of(bits)
    return type(traced)(bits)
