"""Hooks that users register on the gradients of parameters: once for each batch, as in one process.

The backward pass of a batch is one pass for each micro-batch in a pipeline, but ``p.register_hook(lambda g: g.clamp(-1,
1))`` means the batch's gradient. So while a module is divided these hooks are set aside, and called when the gradients
of a batch are complete, on the ranks that hold the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_function
from lightning_smddp._compat.torch_steps import Hooks, hooks_of, install_hooks


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
                for is_post, hooks in enumerate(hooks_of(parameter)):
                    if hooks:
                        self._take(name, hooks, bool(is_post))
        return any(kept.left() for name in parameters for kept in self._kept.get(name, ()))

    def _take(self, name: str, hooks: Hooks, is_post: bool) -> None:
        # torch keeps hooks in dicts of its own, and the handle that a user holds removes a key from such a dict. So
        # the dict and its keys stay, and each function in it is exchanged for one that does nothing.
        known = self._kept.get(name, [])
        kept = next((kept for kept in known if kept.hooks is hooks), None)
        if kept is None:
            kept = _Kept(hooks, is_post)
        kept.take()
        if kept.functions and kept not in known:
            self._kept[name] = [*known, kept]

    def give_back(self) -> None:
        """The module is whole: autograd calls the hooks again."""
        named = dict(self.module.named_parameters())
        with without_torch_function():
            for name, dicts in self._kept.items():
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
        return any(kept.left() for dicts in self._kept.values() for kept in dicts)

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
            if parameters[name].grad is not None:
                function(parameters[name])

    def _calls(self, parameters: Mapping[str, Tensor], post: bool) -> list[tuple[str, Callable[[Tensor], Any]]]:
        """The last parameters first, as a backward pass comes to them."""
        found = []
        for name in reversed(list(parameters)):
            for kept in self._kept.get(name, ()):
                if kept.is_post is post:
                    found += [(name, function) for function in kept.left()]
        return found


class _Kept:
    """The hooks of one parameter. Their dict stays, as handles remove hooks from it; it holds nothing that acts."""

    def __init__(self, hooks: Hooks, is_post: bool) -> None:
        self.hooks = hooks
        self.is_post = is_post
        self.functions: dict[int, Callable[[Tensor], Any]] = {}

    def take(self) -> None:
        """Exchange each of the users' functions for one that does nothing, under the same key."""
        for key, function in self.hooks.items():
            if not isinstance(function, OwnHook) and function is not _nothing:
                self.functions[key], self.hooks[key] = function, _nothing

    def left(self) -> list[Callable[[Tensor], Any]]:
        """Those that were not removed since."""
        return [function for key, function in self.functions.items() if key in self.hooks]

    def give_back(self) -> None:
        """Let autograd call the functions again, under the keys that their handles remove."""
        self.hooks.update({key: function for key, function in self.functions.items() if key in self.hooks})


def _nothing(_: Tensor) -> None:
    """Stands for a hook that was set aside."""
