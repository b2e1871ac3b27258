"""Words of messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 unit``, ``2 units``: ``number`` of what ``noun`` is one of."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("ch", "ss")):
        return f"{number} {noun}es"
    return f"{number} {noun}s"
