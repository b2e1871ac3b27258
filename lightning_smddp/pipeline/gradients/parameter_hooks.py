"""Hooks that users register on the gradients of parameters: once for each batch, as in one process.

The backward pass of a batch is one pass for each micro-batch in a pipeline, but ``p.register_hook(lambda g: g.clamp(-1,
1))`` means the batch's gradient. So while a module is divided these hooks are set aside, and called when the gradients
of a batch are complete, on the ranks that hold the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_function
from lightning_smddp._compat.torch_steps import Hooks, hooks_of, install_hooks

Hook: TypeAlias = Callable[[Tensor], Any]


class OwnHook(partial[None]):
    """One of this package's, which is left where it is."""


class ParameterHooks:
    """The users' hooks on a module's parameters.

    Attributes:
        from_start: whether there were any when this was made, on all ranks alike.

    Args:
        module: not divided yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kept: dict[str, list[_Kept]] = {}
        self.take(dict(module.named_parameters()))
        self.from_start = bool(self._kept)

    def take(self, parameters: Mapping[str, Tensor]) -> bool:
        """Set aside what was registered on these since. Returns whether there are any."""
        with without_torch_function():
            for name, parameter in parameters.items():
                before, post = hooks_of(parameter)
                if before:
                    self._take(name, before, is_post=False)
                if post:
                    self._take(name, post, is_post=True)
        return any(self._left(name) for name in parameters)

    def _take(self, name: str, hooks: Hooks, is_post: bool) -> None:
        # torch keeps hooks in dicts of its own, and the handle that a user holds removes a key from such a dict. So
        # the dict and its keys stay, and each function in it is exchanged for one that does nothing.
        for kept in self._kept.get(name, ()):
            if kept.hooks is hooks:
                kept.take()
                return
        kept = _Kept(hooks, is_post)
        kept.take()
        if kept.functions:
            self._kept.setdefault(name, []).append(kept)

    def give_back(self) -> None:
        """The module is whole: autograd calls the hooks again."""
        named = dict(self.module.named_parameters())
        with without_torch_function():
            for name, dicts in self._kept.items():
                # Several dicts of a kind, where the parameter's memory was exchanged in between: that lets go of its
                # hooks, and what is registered then is in a new dict. Each keeps the handles that remove from it.
                for kept in dicts:
                    kept.give_back()
                before = [kept.hooks for kept in dicts if not kept.is_post]
                post = [kept.hooks for kept in dicts if kept.is_post]
                if name in named:
                    install_hooks(named[name], before, post)
        self._kept = {}

    @property
    def has_any(self) -> bool:
        """Whether a user's hook has been registered on a parameter of this rank."""
        return any(self._left(name) for name in self._kept)

    def _left(self, name: str) -> bool:
        """Whether a hook on this parameter was not removed since."""
        return any(kept.left() for kept in self._kept.get(name, ()))

    def on_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Call those of ``register_hook``: ``.grad`` is the batch's."""
        for name, function in self._calls(parameters, post=False):
            parameter = parameters[name]
            if parameter.grad is not None:
                changed = function(parameter.grad)
                if changed is not None:
                    parameter.grad = changed

    def behind_accumulation(self, parameters: Mapping[str, Tensor]) -> None:
        """Call hooks of ``register_post_accumulate_grad_hook`` where there is a gradient, last parameters first."""
        for name, function in self._calls(parameters, post=True):
            parameter = parameters[name]
            if parameter.grad is not None:
                function(parameter)

    def _calls(self, parameters: Mapping[str, Tensor], post: bool) -> list[tuple[str, Hook]]:
        """The last parameters first, as a backward pass comes to them."""
        # All are collected before any is called: a hook may remove itself.
        found: list[tuple[str, Hook]] = []
        for name in reversed(list(parameters)):
            for kept in self._kept.get(name, ()):
                if kept.is_post is not post:
                    continue
                for function in kept.left():
                    found.append((name, function))
        return found


class _Kept:
    """The hooks of one parameter. Their dict stays, as handles remove hooks from it; it holds nothing that acts."""

    def __init__(self, hooks: Hooks, is_post: bool) -> None:
        self.hooks = hooks
        self.is_post = is_post
        self.functions: dict[int, Hook] = {}

    def take(self) -> None:
        """Exchange each of the users' functions for one that does nothing, under the same key."""
        for key, function in self.hooks.items():
            if not isinstance(function, OwnHook) and function is not _nothing:
                self.functions[key] = function
                self.hooks[key] = _nothing

    def left(self) -> list[Hook]:
        """Those that were not removed since."""
        return [function for key, function in self.functions.items() if key in self.hooks]

    def give_back(self) -> None:
        """Let autograd call the functions again, under the keys that their handles remove."""
        for key, function in self.functions.items():
            if key in self.hooks:
                self.hooks[key] = function


def _nothing(_: Tensor) -> None:
    """Stands for a hook that was set aside."""
