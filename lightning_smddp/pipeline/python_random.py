"""The states of Python's and numpy's random numbers."""

from __future__ import annotations

import random
import sys
from typing import Any


def python_random_state() -> Any:
    """Both states; numpy's is None while nobody imported it."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def set_python_random_state(state: Any) -> None:
    """Put them back."""
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def same_random_state(a: Any, b: Any) -> bool:
    """Whether no number was drawn between the two."""
    return a[0] == b[0] and (a[1] is None or b[1] is None or (a[1][2] == b[1][2] and (a[1][1] == b[1][1]).all()))
