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
    for something else from some position on is on another path: it gets no answer, and its own are remembered instead.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Any, list[Any], Any]] = []

    def find(self, position: int, function: Any, arguments: tuple[Any, Any]) -> Any:
        """What ``function`` of ``arguments``, question number ``position``, was answered; NOTHING if unknown."""
        if position >= len(self._known):
            return NOTHING
        known_function, sizes, result = self._known[position]
        if known_function is not function or sizes != _sizes(arguments):
            return NOTHING
        return copy.copy(result)

    def note(self, position: int, function: Any, arguments: tuple[Any, Any], result: Any) -> bool:
        """Remember ``result`` at ``position``, and nothing behind it; False if it is nothing to remember."""
        if not _is_value(result):
            return False
        self._known[position:] = [(function, _sizes(arguments), copy.copy(result))]
        return True


def _is_value(result: Any) -> bool:
    """Numbers, and a list of them: no memory that a caller could change, nor the None of a change in place."""
    if isinstance(result, list):
        return all(isinstance(entry, (bool, int, float, complex)) for entry in result)
    return isinstance(result, (bool, int, float, complex))


def _sizes(arguments: tuple[Any, Any]) -> list[Any]:
    """What has to be equal for two calls to be the same one: the shape of each tensor, the text of all else."""
    sizes: list[Any] = []
    for leaf in leaves(arguments):
        if isinstance(leaf, Tensor):
            sizes.append(tuple(leaf.shape))
        else:
            sizes.append(repr(leaf))
    return sizes
