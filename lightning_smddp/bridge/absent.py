"""Values that are on another rank, where code that runs on all ranks comes across them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_smddp.pytree import tensors

_READS = frozenset({
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "equal",
    "is_nonzero", "item", "numpy", "tolist",
})  # fmt: skip
_plain: Any = vars(Tensor)["__torch_function__"].__func__
_QUESTIONS = frozenset({"__get__", "__repr__", "__str__", "__format__", "dim", "is_floating_point", "numel", "size"})


class AbsentValueError(RuntimeError):
    """A value was used on a rank that does not have it."""


class AbsentTensor(Tensor):
    """Raises ``AbsentValueError`` where it is used.

    Attributes:
        text: of the error.
        computes: whether its shape is known: it may be computed with, which gives others of its kind, but not read.
    """

    text: str
    computes: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        absent = next(leaf for leaf in tensors((args, kwargs)) if isinstance(leaf, AbsentTensor))
        if name in _READS or not (absent.computes or name in _QUESTIONS):
            raise AbsentValueError(absent.text)
        result = _plain(cls, func, types, args, kwargs or {})
        for tensor in tensors(result):
            if isinstance(tensor, AbsentTensor):
                tensor.text, tensor.computes = absent.text, absent.computes
        return result


def absent_tensor(text: str, like: Tensor | None = None) -> AbsentTensor:
    """One that raises with ``text``: where it is read, if its shape is that of ``like``, else by any use."""
    made = torch.empty(0) if like is None else torch.zeros_like(like)
    if made.is_floating_point():
        made.fill_(torch.nan)
    absent = made.as_subclass(AbsentTensor)
    absent.text, absent.computes = text, like is not None
    return absent
