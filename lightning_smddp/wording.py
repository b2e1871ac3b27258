"""Words of messages."""

from __future__ import annotations

USE_INSTEAD = "Use strategy='smddp' (strategy='smddp_fsdp' where the model does not fit on one device)."
"""Behind why a pipeline cannot train a module."""


def counted(number: int, noun: str) -> str:
    """``1 unit``, ``2 units``: ``number`` of what ``noun`` is one of."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("ch", "ss")):
        return f"{number} {noun}es"
    return f"{number} {noun}s"
