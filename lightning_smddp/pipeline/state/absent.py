"""Parameters whose values are on another rank: they keep name, shape and flags, and lose their memory.

They are on the meta device, on which torch does in-place operations without a word: ``average.add_(absent)`` leaves
``average`` as it was. So using one where nobody looks after that is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import swap_contents, without_torch_function
from lightning_smddp._compat.torch_steps import hooks_of, install_hooks
from lightning_smddp.pipeline.capture.ops import Kind, kind_of, name_of, sets_flag, user_location
from lightning_smddp.pipeline.mesh import Ownership
from lightning_smddp.pipeline.runtime.remote_tensor import active_run
from lightning_smddp.wire.pytree import LEAF_TYPES, leaves

_HARMLESS = {Kind.METADATA, Kind.WATCHER, Kind.LIKE}  # functions of these kinds need no values
_allowed = threading.local()  # .depth: how many `may_be_absent` this thread is in


class AbsentParameterError(RuntimeError):
    """A parameter of another rank was used outside of hooks, where its values cannot be had."""


class AbsentParameter(nn.Parameter):
    """A parameter without values: shape, dtype and flags can be asked for, and nothing else."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each torch function that gets such a parameter, unless a mode comes first."""
        kwargs = kwargs or {}
        run = active_run()
        if run is not None and not run.inside:
            return run.parameter_operation(function, args, kwargs)
        with without_torch_function():
            absent = None
            if not getattr(_allowed, "depth", 0) and not _is_harmless(function, args):
                absent = _first_absent(args, kwargs)
            if absent is None:
                return function(*args, **kwargs)
        name, rank = vars(absent)["_held_by"]
        raise AbsentParameterError(
            f"{name_of(function)} at {user_location()} uses parameter {name!r}, whose values are on rank {rank} of "
            "the pipeline. Hooks and callbacks of Lightning may use all parameters, on all ranks alike; other code may "
            "not. Do it in a hook such as `on_train_batch_end`."
        )


LEAF_TYPES.add(AbsentParameter)


def _is_harmless(function: Any, args: Any) -> bool:
    """Whether ``function`` needs no values: it asks for metadata, a flag, ``grad``, or a private attribute of torch."""
    name = name_of(function)
    is_attribute = getattr(function, "__name__", "") in ("__get__", "__set__")
    if name == "grad" or (is_attribute and name.startswith("_")):
        return True
    return kind_of(function, args) in _HARMLESS or sets_flag(function)


def _first_absent(*arguments: Any) -> AbsentParameter | None:
    for leaf in leaves(arguments):
        if isinstance(leaf, AbsentParameter) and leaf.is_meta:
            return leaf
    return None


@contextmanager
def may_be_absent() -> Iterator[None]:
    """Around code of torch or ours that goes over all parameters, and may do nothing to absent ones."""
    _allowed.depth = getattr(_allowed, "depth", 0) + 1
    try:
        yield
    finally:
        _allowed.depth -= 1


def release(module: nn.Module, ownership: Ownership, rank: int) -> None:
    """Free the memory of the parameters that ``rank`` does not hold: they become meta tensors.

    They stay the same objects under all their names and in the user's own lists, with shape, dtype, ``requires_grad``
    and hooks; their gradients go. Buffers stay. Memory that something else still refers to (a view, a live autograd
    graph) is freed when that goes. Repeating it changes nothing.

    Raises:
        ValueError: the module has other parameters than were placed.
    """
    ownership.check(module)
    for name, parameter in module.named_parameters():
        if ownership.is_mine(name, rank):
            continue
        set_contents(parameter, torch.empty_like(parameter, device="meta"))
        # Parameters of other classes than torch's own are left alone.
        if type(parameter) is nn.Parameter:
            vars(parameter)["_held_by"] = (name, ownership.owner(name))
            parameter.__class__ = AbsentParameter


def set_contents(tensor: Tensor, value: Tensor) -> None:
    """Give ``tensor`` the memory of ``value``, on any device; the object and its hooks stay, its gradient goes."""
    # before:  object `tensor` -> meta, no values       after:  object `tensor` -> values
    # The Python object stays, so whoever holds it (optimizers, ties, lists of the user's) has the values too.
    hooks = hooks_of(tensor)  # they would go with the contents
    swap_contents(tensor, value.detach().requires_grad_(tensor.requires_grad))
    install_hooks(tensor, hooks)
    if isinstance(tensor, AbsentParameter) and not tensor.is_meta:
        del vars(tensor)["_held_by"]
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]
