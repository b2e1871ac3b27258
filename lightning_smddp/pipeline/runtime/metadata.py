"""What Python may ask about tensors of other stages: shapes, types, devices, gradients, but no numbers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_smddp._compat.torch import idle_node
from lightning_smddp.pipeline.capture.ops import asks_for_device, device_answer, name_of
from lightning_smddp.pipeline.runtime.remote import RemoteTensor
from lightning_smddp.pipeline.runtime.stage_values import StageValues
from lightning_smddp.wire.pytree import map_leaves

_FROM_PATTERN = {"shape", "size", "dtype", "dim", "ndim", "__len__", "stride"}  # the usual questions


class Metadata:
    """Answers questions about tensors as if all of them were here.

    Two kinds are elsewhere: a :class:`RemoteTensor`, and a parameter of another stage, which is on the meta device.

    Args:
        values: of the run.
        device: of this rank.
    """

    def __init__(self, values: StageValues, device: torch.device) -> None:
        self.values, self.device = values, device

    def ask(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function that asks for no numbers answers."""
        if not args or not isinstance(args[0], Tensor):
            return _call_with_patterns(function, args, kwargs)
        subject = args[0]
        if _is_without_numbers(subject):
            return self._of_remote(function, subject, args, kwargs)
        if len(args) > 1:
            args = map_leaves(_pattern, args)
        answer = function(*args, **kwargs)
        # Where shapes are found a received tensor is a leaf, which it is not in one process.
        is_leaf_here = answer is None and name_of(function) == "grad_fn" and subject.requires_grad
        if is_leaf_here and self.values.is_elsewhere(subject):
            return idle_node()
        return answer

    def _of_remote(self, function: Any, subject: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(function)
        if name in _FROM_PATTERN and len(args) == 1:
            self.values.value_of(subject)  # refuses one of an earlier micro-batch
            return function(_pattern(subject))
        if asks_for_device(name):
            return device_answer(name, _pattern(subject).dtype, self.device)
        if name in ("__repr__", "__format__", "__str__"):
            return f"<tensor of shape {tuple(_pattern(subject).shape)} on another stage>"
        value = self.values.value_of(subject)
        if value is not None and name in ("requires_grad", "is_leaf", "grad_fn"):
            requires_grad = self.values.shapes.values[value].requires_grad and torch.is_grad_enabled()
            if name == "requires_grad":
                return requires_grad
            if name == "is_leaf":
                return not requires_grad
            if requires_grad:
                return idle_node()
            return None
        return _call_with_patterns(function, args, kwargs)

    def watch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Register a hook on a gradient where the value is made: elsewhere it would act a second time."""
        if not isinstance(args[0], Tensor) or not self.values.is_elsewhere(args[0]):
            return function(*args, **kwargs)
        if name_of(function) == "retain_grad":
            return None
        return RemovableHandle(OrderedDict())

    def like(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A new tensor in the likeness of another one, as ``zeros_like`` makes it: on this rank's device."""
        subject = args[0] if args else next(iter(kwargs.values()))
        if _is_without_numbers(subject) and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        return _call_with_patterns(function, args, kwargs)


def _is_without_numbers(tensor: Tensor) -> bool:
    return type(tensor) is RemoteTensor or tensor.device.type == "meta"


def _call_with_patterns(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*map_leaves(_pattern, args), **map_leaves(_pattern, kwargs))


def _pattern(leaf: Any) -> Any:
    return leaf.pattern if type(leaf) is RemoteTensor else leaf
