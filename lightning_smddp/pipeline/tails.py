"""What a step does behind its last module: on one rank, in code that no rehearsal comes to.

It may change in mid-training: a term that is added to the loss after a warm-up, a sum where there was a mean. The
stage that runs it sees which functions follow each other. Loops are as long as the data wants and show no new pair of
functions, so that a tail of another length is no other tail.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from lightning_smddp.pipeline.functions import name_of

Pairs: TypeAlias = set[tuple[str, str]]  # of functions, each with the words and flags that it was given

_BEGIN, _END = "begin", "end"
_WORDS = frozenset((str, bool, type(None)))


class Tail:
    """The functions of one run, in their order."""

    def __init__(self) -> None:
        self.pairs: Pairs = set()
        self._last = _BEGIN

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``function`` is called now."""
        name = name_of(function)
        for value in args:
            if type(value) in _WORDS:
                name = f"{name} {value}"
        for value in kwargs.values():
            if type(value) in _WORDS:
                name = f"{name} {value}"
        self._add(name)

    def end(self) -> None:
        """The step returns."""
        self._add(_END)

    def _add(self, name: str) -> None:
        self.pairs.add((self._last, name))
        self._last = name
