"""Compiled functions and modules in a step that is traced or replayed.

``torch.compile`` would trace through our function modes, once, and leave them out from then on. So while a mode sees
a step, compiled code runs as the Python code that it was made of; inside a unit, where no mode looks, it runs compiled.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_lock = threading.Lock()
_users = 0
_stance: Any = None  # torch's, which puts back what was before it


class Eager:
    """A context in which compiled code is not compiled. The stance is the process's, so its users are counted."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _users, _stance
        with _lock:
            _users += 1
            if _users > 1:
                return
            if _stance is None:
                _stance = torch.compiler.set_stance("force_eager")
            else:
                _stance.__enter__()

    def __exit__(self, *error: object) -> None:
        global _users
        with _lock:
            _users -= 1
            if _users == 0:
                _stance.__exit__(None, None, None)


class Compiled:
    """A context inside of :class:`Eager` in which compiled code is compiled, if ``really``."""

    __slots__ = ("eager", "really")  # no generator: entered for every call of a unit

    def __init__(self, really: bool) -> None:
        self.eager, self.really = Eager(), really

    def __enter__(self) -> None:
        if self.really:
            self.eager.__exit__()

    def __exit__(self, *error: object) -> None:
        if self.really:
            self.eager.__enter__()
