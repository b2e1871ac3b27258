"""Activation checkpointing of modules that change what they are given.

``torch.utils.checkpoint`` runs a module again on the very arguments of its first run. A cache of keys and values, which
language models hand from layer to layer (``use_cache=True``), then has in it already what the first run put there: the
second one sees twice as many keys, or finds its own and computes less. So the second run gets such arguments as they
were before the first. Tensors and modules in them are the same; what is around them is copied.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_NEVER_CHANGES = (
    type(None), bool, int, float, complex, str, bytes, Tensor, nn.Module, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_SHARED = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, ModuleType, torch.Generator)


class RunAgain:
    """``forward`` for ``torch.utils.checkpoint``; every later run meets objects as they were before the first one.

    Args:
        forward: of a module.
        args, kwargs: what it is going to be called with.
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward = forward
        self._has_run = False
        self._positions = {place: _copy(value) for place, value in enumerate(args) if _may_change(value)}
        self._names = {name: _copy(value) for name, value in kwargs.items() if _may_change(value)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward``: first with what is given, later with what that was before the first time."""
        if not self._has_run:
            self._has_run = True
            return self._forward(*args, **kwargs)
        # Copies again: the backward pass may run it more than once (`retain_graph`).
        given = list(args)
        for place, value in self._positions.items():
            given[place] = _copy(value)
        named = {name: _copy(value) for name, value in self._names.items()}
        return self._forward(*given, **{**kwargs, **named})


def _may_change(value: Any) -> bool:
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return any(_may_change(member) for member in value)
    return not isinstance(value, _NEVER_CHANGES)


def _copy(value: Any) -> Any:
    """A copy with the same tensors, modules, classes and functions; ``value`` itself if it cannot be copied."""
    shared: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, _SHARED):
            shared[id(found)] = found
        else:
            waiting += gc.get_referents(found)
    try:
        return copy.deepcopy(value, shared)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, copy.Error):
        return value  # a lock, a file: as torch does it
