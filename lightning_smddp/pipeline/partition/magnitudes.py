"""Orders of magnitude of numbers that a step works with: by them one sees a weight that grows from zero.

A number that is another one each time (a count of what the batch has, a running mean) has another order seldom. Numbers
whose order never comes to rest are news a few times and no more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Magnitude: TypeAlias = tuple[int, int]  # sign and decade
Magnitudes: TypeAlias = "dict[Hashable, list[tuple[Magnitude, ...]]]"
"""By position in the code, or by name, those of the numbers there; one entry for each turn of a loop."""

_NUMBERS = frozenset((int, float))
_ZERO, _NOT_FINITE = (0, 0), (2, 0)
_MOST_TURNS = 16  # that are told from each other
_MOST_DECADES, _MOST_ZEROS = 8, 16  # as often anything is new


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
    decade = math.floor(math.log10(size))
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

    seen: dict[Hashable, dict[int, set[tuple[Magnitude, ...]]]] = field(default_factory=dict)
    times: int = 0

    def is_new(self, numbers: Mapping[Hashable, Sequence[tuple[Magnitude, ...]]]) -> bool:
        """Whether one of them is worth a trial: it never was there, and there were not too many such ones."""
        most = 0
        for position, turns in numbers.items():
            seen = self.seen.get(position, {})
            for turn, found in enumerate(turns):
                before = _before(seen, turn)
                if found in before:
                    continue
                if _zeros(found) in {_zeros(others) for others in before}:
                    most = max(most, _MOST_DECADES)
                else:  # a number that was zero, or is now: more often worth a trial
                    most = max(most, _MOST_ZEROS)
        return self.times < most

    def accept(self, everything: Sequence[Mapping[Hashable, Sequence[tuple[Magnitude, ...]]]]) -> None:
        """These, of a batch, are known from here on."""
        self.times += bool(self.seen) and any(map(self.is_new, everything))
        for numbers in everything:
            for position, turns in numbers.items():
                seen = self.seen.setdefault(position, {})
                for turn, found in enumerate(turns):
                    seen.setdefault(min(turn, _MOST_TURNS), set()).add(found)


def _before(seen: Mapping[int, set[tuple[Magnitude, ...]]], turn: int) -> set[tuple[Magnitude, ...]]:
    """What a turn of a loop had; a loop that is longer than ever may go on with what any turn had."""
    of_turn = seen.get(min(turn, _MOST_TURNS))
    if of_turn is None:
        return set().union(*seen.values())
    return of_turn


def _zeros(numbers: tuple[Magnitude, ...]) -> tuple[bool, ...]:
    return tuple(number == _ZERO for number in numbers)
