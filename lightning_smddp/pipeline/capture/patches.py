"""Modules and objects that are something else for a while: another ``forward``, another attribute, compiled or not.

``torch.compile`` would trace through our function modes, once, and leave them out from then on. So while a mode sees
a step, compiled code runs as the Python code that it was made of; inside a unit, where no mode looks, it runs compiled.

``torch.utils.checkpoint`` runs a module again on the very arguments of its first run. A cache of keys and values, which
language models hand from layer to layer (``use_cache=True``), then has in it already what the first run put there: the
second one sees twice as many keys, or finds its own and computes less. So the second run gets such arguments as they
were before the first. Tensors and modules in them are the same; what is around them is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import compiled_call, set_compiled_call, visible_autograd_functions

Forward: TypeAlias = Callable[..., Any]

_lock = threading.Lock()
_users = 0
_stance: Any = None  # torch's, which puts back what was before it

_NEVER_CHANGES = (
    type(None), bool, int, float, complex, str, bytes, Tensor, nn.Module, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_SHARED = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, ModuleType, torch.Generator)


@contextmanager
def patched_forwards(
    root: nn.Module,
    wrap: Callable[[str, Forward], Forward],
    names: Mapping[str, Any] | None = None,
    compiled: bool = False,
    sees_apply: bool = True,
) -> Iterator[None]:
    """Replace the ``forward`` of each submodule (or of those in ``names``) by ``wrap(name, forward)``.

    Hooks still fire. With ``compiled``, a module that was compiled by its ``compile()`` is replaced as that, so that it
    still runs compiled. With ``sees_apply`` each ``autograd.Function`` is one operation, which breaks compiled code.
    """
    patched: list[tuple[nn.Module, Any]] = []
    calls: list[tuple[nn.Module, Any]] = []
    try:
        with visible_autograd_functions() if sees_apply else nullcontext():
            found = root.named_modules() if names is None else [(name, root.get_submodule(name)) for name in names]
            for name, module in found:
                if module is root:
                    continue
                # In the instance's dict, so that hooks still fire and the class stays as it is: `module.forward` is
                # looked up there first. One of the user's own that was there has to come back.
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


def _with_forward(module: nn.Module, own: Any, call: Forward) -> Forward:
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


class Eager:
    """A context in which compiled code is not compiled. The stance is the process's, so its users are counted."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _users, _stance
        with _lock:
            _users += 1
            if _users > 1:
                return
            # torch's stance is one for the whole process, and contexts of several threads may overlap: the first one in
            # sets it, the last one out takes it back.
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
