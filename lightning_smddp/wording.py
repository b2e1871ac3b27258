"""Words of messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 unit``, ``2 units``: ``number`` of what ``noun`` is one of."""
    ending = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"
