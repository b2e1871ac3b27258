"""Values that are on another rank, where code that runs on all ranks comes across them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_smddp.wire.pytree import tensors

_READS = frozenset({
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal",
    "is_nonzero", "item", "numpy", "tolist",
})  # fmt: skip
_plain: Any = vars(Tensor)["__torch_function__"].__func__
_QUESTIONS = frozenset({"__get__", "__repr__", "__str__", "__format__", "dim", "is_floating_point", "numel", "size"})


class AbsentValueError(RuntimeError):
    """A value was used on a rank that does not have it."""


class AbsentTensor(Tensor):
    """Raises ``AbsentValueError`` where it is used."""

    text: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _QUESTIONS:
            raise AbsentValueError(cls._text((args, kwargs)))
        return _plain(cls, func, types, args, kwargs or {})

    @classmethod
    def _text(cls, args: Any) -> str:
        return next(tensor.text for tensor in tensors(args) if isinstance(tensor, AbsentTensor))


class AbsentNumbers(AbsentTensor):
    """Numbers that only their rank knows. They may be computed with, which gives others of their kind, but not read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise AbsentValueError(cls._text((args, kwargs)))
        result = _plain(cls, func, types, args, kwargs or {})
        if isinstance(result, AbsentNumbers):
            result.text = cls._text((args, kwargs))
        return result


def absent_tensor(text: str) -> AbsentTensor:
    """One that raises with ``text``."""
    return _with_text(torch.empty(0).as_subclass(AbsentTensor), text)


def absent_like(tensor: Tensor, text: str) -> AbsentTensor:
    """One of the shape of ``tensor`` that may be computed with, and raises with ``text`` when it is read."""
    like = torch.zeros_like(tensor)
    if tensor.is_floating_point():
        like.fill_(torch.nan)
    return _with_text(like.as_subclass(AbsentNumbers), text)


def _with_text(tensor: AbsentTensor, text: str) -> AbsentTensor:
    tensor.text = text
    return tensor
