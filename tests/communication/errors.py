"""Catching errors in rank bodies without holding on to their frames, and so to the ranks' groups."""

from __future__ import annotations

from collections.abc import Callable


def message_of(kind: type[BaseException], call: Callable[[], object]) -> str:
    """The message of the error that ``call`` raises; fails unless it is of just this kind."""
    try:
        call()
    except BaseException as error:
        if type(error) is kind:
            return str(error)
        raise
    raise AssertionError(f"no {kind.__name__} was raised")
