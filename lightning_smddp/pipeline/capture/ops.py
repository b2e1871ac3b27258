"""What kinds of torch functions there are between units, seen from a ``TorchFunctionMode``."""

from __future__ import annotations

import functools
import sys
from enum import Enum
from traceback import walk_stack
from typing import Any

import torch

# Properties that make a tensor of a tensor; all other properties are metadata.
_TENSOR_PROPERTIES = {"T", "H", "mT", "mH", "data", "real", "imag", "grad", "_base"}

# Functions that ask for shape, type or place, not for values. (Properties are recognised without this list; what is
# rare and not here is taken for a read value, which is sent.)
_METADATA = {
    "__hash__", "__len__", "__repr__", "__format__", "__str__", "dim", "element_size", "get_device", "is_complex",
    "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_same_size", "is_tensor",
    "ndimension", "nelement", "numel", "result_type", "size", "storage_offset", "stride",
}  # fmt: skip

# Watch a tensor's gradient; the tensor stays as it is.
_WATCHERS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}

# Take a tensor as a pattern for shape and type.
_LIKE = {
    "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "ones_like",
    "zeros_like",
}  # fmt: skip

# How many random numbers they draw depends on the values that they are given.
DRAW_BY_VALUE = {"_sample_dirichlet", "_standard_gamma", "binomial", "poisson", "rrelu"}

# Backward passes of the user's own: the part of the graph that lies on other ranks would be missing.
_BACKWARD = {"backward", "grad"}

# Properties of parameters that a step may set: they change no value.
_HARMLESS_TO_SET = {"requires_grad", "grad"}


class Kind(Enum):
    """What a function means for a step that is cut in stages."""

    OPERATION = "operation"
    METADATA = "metadata"
    WATCHER = "watcher"
    LIKE = "like"
    BACKWARD = "backward"


# By name; what is not here is an operation.
_KINDS = {
    **dict.fromkeys(_METADATA, Kind.METADATA),
    **dict.fromkeys(_WATCHERS, Kind.WATCHER),
    **dict.fromkeys(_LIKE, Kind.LIKE),
    **dict.fromkeys(_BACKWARD, Kind.BACKWARD),
}


@functools.lru_cache(maxsize=4096)
def name_of(function: Any) -> str:
    """A readable name, ``shape`` for ``Tensor.shape.__get__``."""
    name = getattr(function, "__name__", None)
    owner = getattr(function, "__self__", None)
    if name in ("__get__", "__set__", "__delete__"):
        return str(getattr(owner, "__name__", name))
    if is_autograd_function(function):
        return f"{function.__self__.__name__}.apply"
    return str(name or function)


def is_autograd_function(function: Any) -> bool:
    """Whether ``function`` is the ``apply`` of an ``autograd.Function``."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def draws_by_value(function: Any) -> bool:
    """Whether shapes alone may not tell how many random numbers ``function`` draws."""
    return name_of(function) in DRAW_BY_VALUE or is_autograd_function(function)


@functools.lru_cache(maxsize=4096)
def _kind(function: Any) -> Kind:
    name = name_of(function)
    attribute = getattr(function, "__name__", None)
    if attribute == "__get__":
        return Kind.OPERATION if name in _TENSOR_PROPERTIES else Kind.METADATA
    return Kind.OPERATION if attribute == "__set__" else _KINDS.get(name, Kind.OPERATION)


def kind_of(function: Any, args: tuple[Any, ...]) -> Kind:
    """What calling ``function`` with ``args`` is."""
    kind = _kind(function)
    # `x.type()` asks for the type, `x.type(torch.float16)` makes another tensor.
    if kind is Kind.OPERATION and len(args) == 1 and function.__name__ == "type":
        return Kind.METADATA
    return kind


@functools.lru_cache(maxsize=4096)
def is_inplace(function: Any) -> bool:
    """Whether ``function`` changes its first argument, by its name."""
    name = name_of(function)
    if getattr(function, "__name__", None) in ("__set__", "__setitem__"):
        return True
    if name.startswith("__i"):  # `__iadd__`
        return name not in ("__index__", "__int__", "__invert__", "__init__")
    return name.endswith("_") and not name.endswith("__")


@functools.lru_cache(maxsize=4096)
def sets_flag(function: Any) -> bool:
    """Whether ``function`` sets ``requires_grad`` or ``grad``, which on a parameter changes no value."""
    if getattr(function, "__name__", None) == "__set__":
        return name_of(function) in _HARMLESS_TO_SET
    return name_of(function) == "requires_grad_"


def asks_for_device(name: str) -> bool:
    """Whether a metadata function asks where a tensor is."""
    return name in ("device", "get_device", "type", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu")


def device_answer(function: Any, args: tuple[Any, ...], device: torch.device) -> Any:
    """What such a function answers for a tensor like ``args[0]`` on ``device``."""
    like = torch.empty(0, dtype=args[0].dtype, device=device)
    return function(like, *args[1:])


# ---- the user's code that runs now -----------------------------------------------------------------------------------

_NO_USERS = ("torch.", "lightning_smddp.", "contextlib")  # files whose code is not the user's


def user_location() -> str:
    """``file:line`` of the innermost code that is neither torch's nor ours."""
    for frame, line in walk_stack(sys._getframe()):
        name = frame.f_globals.get("__name__", "")
        if name != "torch" and not name.startswith(_NO_USERS):
            return f"{frame.f_code.co_filename}:{line}"
    return "?"


def is_in_compiled_code() -> bool:
    """Whether the code that runs now was given to ``torch.compile``, and runs as it is for the moment."""
    for frame, _ in walk_stack(sys._getframe()):
        name = frame.f_globals.get("__name__", "")
        if name == "torch._dynamo.eval_frame":
            return True
        if name.startswith(("lightning.", "pytorch_lightning.")):
            return False
    return False
