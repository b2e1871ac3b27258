"""Errors that name the rank that caused them."""

from __future__ import annotations

from typing import Any


class RankFailedError(RuntimeError):
    """A peer ended or left while this rank waited for it. ``rank`` is the peer's global rank."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, str(self))  # so that it can travel between processes


class RankTimeoutError(RankFailedError):
    """A peer is alive but did not come within the collective timeout."""


class StartError(ValueError):
    """The ranks of a job did not find together. The message is one line, and the same on every rank that is there."""


class NonFiniteGradientError(ValueError):
    """A gradient became NaN or infinite; the step was not taken."""
