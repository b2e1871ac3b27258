"""A step without chance: random numbers are the same for every row, and dropout lets everything through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout",
    "feature_alpha_dropout",
}  # fmt: skip
_HALVES = {"rand", "rand_like", "randn", "randn_like"}


class ConstantRandom(TorchFunctionMode):
    """While active, torch's random numbers are constants, so that rows do not depend on how many there are.

    What other functions draw stays random.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            return function(*args[:4], **{**_rest(args), **kwargs, "dropout_p": 0.0})
        result = function(*args, **kwargs)
        constant = _constant(name, args, kwargs)
        if constant is None or not isinstance(result, Tensor):
            return result
        with torch.no_grad():
            return result.copy_(constant(result) if callable(constant) else torch.as_tensor(constant))


def _rest(args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments of attention behind the mask, by name."""
    return dict(zip(("dropout_p", "is_causal"), args[4:], strict=False))


def _constant(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a random tensor is filled with: a value, or a function of the tensor; None if the function draws nothing."""
    if name in _HALVES:
        return 0.5
    if name in ("normal", "normal_"):
        given = dict(zip(("mean", "std"), args[name == "normal_" :], strict=False)) | kwargs
        return given.get("mean", 0.0) + 0.5 * given.get("std", 1.0)
    if name == "uniform_":
        given = dict(zip(("from", "to"), args[1:], strict=False)) | kwargs
        return (given.get("from", 0.0) + given.get("to", 1.0)) / 2
    if name in ("randint", "randint_like"):
        return _middle([*args[name == "randint_like" :]], kwargs)
    if name == "bernoulli":
        return (args[0] > 0.5).to(args[0].dtype) if args else None
    if name == "bernoulli_":
        return 1.0
    if name == "exponential_":
        return 1.0
    if name == "randperm":
        return lambda result: torch.arange(len(result), device=result.device)
    return None


def _middle(args: list[Any], kwargs: dict[str, Any]) -> int:
    """Between the bounds of ``randint``: ``(high, ...)`` or ``(low, high, ...)``."""
    bounds = [value for value in args[:2] if isinstance(value, int)]
    high = kwargs.get("high", bounds[-1] if bounds else 1)
    low = kwargs.get("low", bounds[0] if len(bounds) == 2 else 0)
    return int(low + high) // 2
