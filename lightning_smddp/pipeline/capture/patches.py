"""Modules with another ``forward``, objects with another attribute, for a while; where in the user's code we are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

from torch import nn

from lightning_smddp._compat.torch import compiled_call, set_compiled_call, visible_autograd_functions

Lines: TypeAlias = tuple[tuple[int, int], ...]  # code and instruction of each, from the inside out
_MOST_LINES = 8


@contextmanager
def patched_forwards(
    root: nn.Module,
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    names: Mapping[str, Any] | None = None,
    compiled: bool = False,
) -> Iterator[None]:
    """Replace the ``forward`` of each submodule (or of those in ``names``) by ``wrap(name, forward)``.

    Hooks still fire. While active, function modes see each ``autograd.Function`` as one operation. With ``compiled``,
    a module that was compiled by its ``compile()`` is replaced as that, so that it still runs compiled.
    """
    patched: list[tuple[nn.Module, Any]] = []
    calls: list[tuple[nn.Module, Any]] = []
    try:
        with visible_autograd_functions():
            for name, module in root.named_modules():
                if module is root or (names is not None and name not in names):
                    continue
                own = module.__dict__.get("forward")
                module.__dict__["forward"] = wrap(name, module.forward)
                patched.append((module, own))
                if not compiled:
                    continue
                call = compiled_call(module)
                if call is not None:
                    set_compiled_call(module, wrap(name, _with_forward(module, own, call)))
                    calls.append((module, call))
            yield
    finally:
        for module, call in calls:
            set_compiled_call(module, call)
        for module, own in patched:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def _with_forward(module: nn.Module, own: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` while ``module`` has its own ``forward`` again, so that it is what is compiled."""

    def called(*args: Any, **kwargs: Any) -> Any:
        wrapper = module.__dict__.pop("forward")
        if own is not None:
            module.__dict__["forward"] = own
        try:
            return call(*args, **kwargs)
        finally:
            module.__dict__["forward"] = wrapper

    return called


@contextmanager
def set_within(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this context the attribute ``name`` of ``owner`` is ``value``; behind it, what it was before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def user_location() -> str:
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


def user_lines() -> Lines:
    """The innermost lines of the user's code that lead to here, up to Lightning's loop."""
    found: list[tuple[int, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _MOST_LINES:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("lightning.", "pytorch_lightning.")):
            if found:
                break
        elif not name.startswith(("torch.", "lightning_smddp.", "contextlib")) and name != "torch":
            found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)
