"""Modules with another ``forward`` for a while, and where in the user's code we are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_smddp._compat import visible_autograd_functions


@contextmanager
def patched_forwards(
    root: nn.Module,
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    names: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Replace the ``forward`` of each submodule (or of those in ``names``) by ``wrap(name, forward)``.

    Hooks still fire. While active, function modes see each ``autograd.Function`` as one operation.
    """
    patched: list[tuple[nn.Module, Any]] = []
    try:
        with visible_autograd_functions():
            for name, module in root.named_modules():
                if module is root or (names is not None and name not in names):
                    continue
                own = module.__dict__.get("forward")
                module.__dict__["forward"] = wrap(name, module.forward)
                patched.append((module, own))
            yield
    finally:
        for module, own in patched:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def user_place() -> str:
    """``file:line`` of the innermost code that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "lightning_smddp.", "contextlib")) and name != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"
