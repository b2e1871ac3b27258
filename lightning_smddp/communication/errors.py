"""Errors that name the rank that caused them."""

from __future__ import annotations


class RankFailedError(RuntimeError):
    """A peer ended or left while this rank waited for it. ``rank`` is the peer's global rank."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankTimeoutError(RankFailedError):
    """A peer is alive but did not come within the collective timeout."""
