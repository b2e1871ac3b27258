"""What a step does behind its last module: on one rank, in code that no probe comes to.

It may change in mid-training: a term that is added to the loss after a warm-up, a sum where there was a mean. The
stage that runs it sees which functions follow each other. Loops are as long as the data wants and show no new pair of
functions, so that a tail of another length is no other tail.

A term may be there from the beginning, and count for nothing until its weight grows: ``loss + beta * penalty``. So
the sign and the order of magnitude of each number that a function or a module is given belong to it, too, by the line
of code and by how often that has run before. They are looked at from the step's first line on: the stage that runs the
tail comes through all code between modules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, TypeAlias

from lightning_smddp.pipeline.capture.ops import name_of
from lightning_smddp.pipeline.partition.magnitudes import KnownMagnitudes, Magnitudes, is_number, magnitude

_Pairs: TypeAlias = set[tuple[str, str]]  # of functions, each with the words and flags that it was given

_BEGIN, _END = "begin", "end"
_WORDS = frozenset((str, bool, type(None)))
_DEPTH = 12  # frames that tell a place

# Of a batch that a step has run on, the most that matters: it has changed an object that no trace saw it change; it is
# given numbers of another magnitude; it runs other functions.
NOTHING_NEW, NEW_OWNERS, NEW_NUMBERS, NEW_FUNCTIONS = range(4)


class Tail:
    """The functions of one run behind its last module, in their order, and the numbers given in all of the step.

    Args:
        caller: code that calls the step.
    """

    def __init__(self, caller: CodeType) -> None:
        self.pairs: _Pairs = set()
        self.numbers: Magnitudes = {}  # by place in the code
        self._caller = caller
        self._last = _BEGIN

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the call of a function behind the last module, with its arguments that are words or flags."""
        name = name_of(function)
        for value in (*args, *kwargs.values()):
            if type(value) in _WORDS:
                name = f"{name} {value}"
        self._add(name)

    def note_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function or a module is given these now."""
        found = [magnitude(value) for value in args if is_number(value)]
        if kwargs:
            found += [magnitude(value) for value in kwargs.values() if is_number(value)]
        if found:
            given_here = self.numbers.setdefault(self._place(), [])
            given_here.append(tuple(found))

    def end(self) -> None:
        """Note the end of the step: a tail that ends earlier than a known one is another tail."""
        self._add(_END)

    def _add(self, name: str) -> None:
        self.pairs.add((self._last, name))
        self._last = name

    def _place(self) -> tuple[int, ...]:
        """Where in the user's code we are, also which of two calls in a line: code and instruction of each frame."""
        # Frame 0 is this one, 1 `note_numbers`, 2 the replay, and 3 what has come to the replay: the user's line, or
        # the wrapper of a module's forward. The innermost frames come first.
        place: list[int] = []
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code is not self._caller and len(place) < 2 * _DEPTH:
            place += [id(frame.f_code), frame.f_lasti]
            frame = frame.f_back
        return tuple(place)


@dataclass
class KnownTails:
    """What is known to run behind the last module of a step, and which numbers it is given."""

    pairs: _Pairs = field(default_factory=set)
    numbers: KnownMagnitudes = field(default_factory=KnownMagnitudes)

    def look(self, tail: Tail) -> int:
        """What is new: ``NEW_FUNCTIONS``, ``NEW_NUMBERS`` or ``NOTHING_NEW``."""
        if not tail.pairs <= self.pairs:
            return NEW_FUNCTIONS
        if self.numbers.is_new(tail.numbers):
            return NEW_NUMBERS
        return NOTHING_NEW

    def accept(self, tails: Sequence[Tail]) -> None:
        """These of a batch are known from here on."""
        self.numbers.accept([tail.numbers for tail in tails])
        for tail in tails:
            self.pairs |= tail.pairs
