"""Orders of magnitude of numbers that a step works with: by them one sees a weight that grows from zero.

A number that is another one each time (a count of what the batch has, a running mean) has another order seldom. Numbers
whose order never comes to rest are news a few times and no more.

Some are kept by modules, where nobody looks: a schedule sets ``module.beta``, or fills a buffer with the weight of a
term. What modules do with it inside is not seen, but the number is (:class:`KeptNumbers`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import write_count
from lightning_smddp._compat.torch_steps import registered_buffers

Magnitude: TypeAlias = tuple[int, int]  # sign and decade
Numbers: TypeAlias = tuple[Magnitude, ...]
"""Those at one position in the code, in one turn of a loop."""
Magnitudes: TypeAlias = "dict[Hashable, list[Numbers]]"
"""By position in the code, or by name, those of the numbers there; one entry for each turn of a loop."""

_NUMBERS = frozenset((int, float))
_ZERO = (0, 0)
_NOT_FINITE = (2, 0)
_SCALARS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
_MOST_TURNS = 16  # of a loop that are told from each other
# How often another order of magnitude is worth a trial, and how often a zero where was none, or none where one was.
_MOST_DECADES = 8
_MOST_ZEROS = 16


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number and no flag."""
    return type(value) in _NUMBERS or isinstance(value, np.number)


def magnitude(value: Any) -> Magnitude:
    """The sign and the decade of a number; nothing else is like zero."""
    if value == 0:
        return _ZERO
    size = abs(value)
    if not size < math.inf:  # integers may be too large for any float
        return _NOT_FINITE
    decade = math.floor(math.log10(size))  # 0.02 and 0.07 are alike, 0.2 is another
    if value < 0:
        return -1, decade
    return 1, decade


@dataclass
class KnownMagnitudes:
    """Those that were seen.

    Attributes:
        seen: by position in the code and turn of a loop.
        times: how often there was a new one.
    """

    seen: dict[Hashable, dict[int, set[Numbers]]] = field(default_factory=dict)
    times: int = 0

    def is_new(self, numbers: Mapping[Hashable, Sequence[Numbers]]) -> bool:
        """Whether one of them is worth a trial: it never was there, and there were not too many such ones."""
        # What is new in the strongest sense decides how often there may have been news before.
        most = 0
        for position, turns in numbers.items():
            seen = self.seen.get(position, {})
            for turn, found in enumerate(turns):
                before = _before(seen, turn)
                if found in before:
                    continue
                zeros_before = set(map(_zeros, before))
                if _zeros(found) in zeros_before:
                    most = max(most, _MOST_DECADES)
                else:  # a number that was zero, or is now: more often worth a trial
                    most = max(most, _MOST_ZEROS)
        return self.times < most

    def accept(self, everything: Sequence[Mapping[Hashable, Sequence[Numbers]]]) -> None:
        """These, of a batch, are known from here on."""
        if self.seen and any(map(self.is_new, everything)):
            self.times += 1
        for numbers in everything:
            for position, turns in numbers.items():
                seen = self.seen.setdefault(position, {})
                for turn, found in enumerate(turns):
                    of_turn = seen.setdefault(min(turn, _MOST_TURNS), set())
                    of_turn.add(found)


def _before(seen: Mapping[int, set[Numbers]], turn: int) -> set[Numbers]:
    """What a turn of a loop had; a loop that is longer than ever may go on with what any turn had."""
    of_turn = seen.get(min(turn, _MOST_TURNS))
    if of_turn is not None:
        return of_turn
    of_all: set[Numbers] = set()
    for of_turn in seen.values():
        of_all |= of_turn
    return of_all


def _zeros(numbers: Numbers) -> tuple[bool, ...]:
    return tuple(number == _ZERO for number in numbers)


class KeptNumbers:
    """Those of ``modules``, looked at before each batch of a step.

    To compare what is the same object as before takes about 0.05 us each; a tensor is read when it was written.

    Args:
        modules: with the numbers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._known = KnownMagnitudes()
        self._kept: list[tuple[dict[str, Any], str]] = []  # where each is: in what, under which name
        for module in modules:
            containers = [vars(module)]
            if not isinstance(module, torch.jit.ScriptModule):
                containers.append(registered_buffers(module))
            for own in containers:
                for name, value in own.items():
                    if is_number(value) or _is_scalar(value):
                        self._kept.append((own, name))
        # Of each, what it was when it was last looked at, and how often it had been written; -1 if it was no tensor.
        self._last: list[Any] = [None] * len(self._kept)
        self._written: list[int] = [-1] * len(self._kept)
        self._found: Magnitudes = {}
        self.is_new()
        self.accept()

    def is_new(self) -> bool:
        """Whether one has another order of magnitude than ever."""
        for index, value in self._changed():
            number = value
            if isinstance(value, Tensor):
                number = value.item()
            self._found[index] = [(magnitude(number),)]
        return bool(self._found) and self._known.is_new(self._found)

    def accept(self) -> None:
        """What was found is known from here on."""
        if self._found:
            self._known.accept([self._found])
        self._found = {}

    def _changed(self) -> Iterator[tuple[int, Any]]:
        """Numbers that are others than when this was asked."""
        # Nearly all are the same objects as in the last batch, which is quick to see. A tensor may be the same object
        # and have another value: its count of writes tells that. To read each would be to wait for a device.
        for index, (own, name) in enumerate(self._kept):
            value: Any = own.get(name)
            if value is self._last[index]:
                written = self._written[index]
                if written < 0 or write_count(value) == written:
                    continue
            self._last[index] = value
            self._written[index] = -1
            if _is_scalar(value):
                self._written[index] = write_count(value)
                yield index, value
            elif is_number(value):
                yield index, value


def _is_scalar(value: Any) -> bool:
    """Whether it is a tensor that may be the weight of a term, with a value here."""
    if not isinstance(value, Tensor) or value.requires_grad:
        return False
    if value.is_meta or value.is_inference():  # no value, or no count of writes
        return False
    return value.numel() == 1 and value.dtype in _SCALARS
