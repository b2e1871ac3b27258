"""What Python code reads of a micro-batch: asked of the device once, though each stage and probe runs the code."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from lightning_smddp.wire.pytree import leaves

NOTHING = object()


class Answers:
    """The values that a step has read of one micro-batch, in the order in which it asks for them.

    Runs of the step on the same micro-batch ask the same, as nothing but the batch decides what they do. One that asks
    for something else from some place on is on another path: it gets no answer, and its own are remembered instead.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Any, list[Any], Any]] = []

    def find(self, place: int, function: Any, arguments: tuple[Any, Any]) -> Any:
        """What ``function`` of ``arguments``, asked at ``place``, has answered; NOTHING if that is not known."""
        if place >= len(self._known) or self._known[place][0] is not function:
            return NOTHING
        _, sizes, result = self._known[place]
        return copy.copy(result) if sizes == _sizes(arguments) else NOTHING

    def note(self, place: int, function: Any, arguments: tuple[Any, Any], result: Any) -> bool:
        """Remember ``result`` at ``place``, and nothing behind it; False if it is nothing to remember."""
        if not _is_value(result):
            return False
        self._known[place:] = [(function, _sizes(arguments), copy.copy(result))]
        return True


def _is_value(result: Any) -> bool:
    """Numbers, and a list of them: no memory that a caller could change, nor the None of a change in place."""
    if isinstance(result, list):
        return all(isinstance(entry, (bool, int, float, complex)) for entry in result)
    return isinstance(result, (bool, int, float, complex))


def _sizes(arguments: tuple[Any, Any]) -> list[Any]:
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves(arguments)]
