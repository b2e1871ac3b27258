"""Parameters whose values are on another rank: using them where nobody looks after that is an error, not nothing.

They are tensors on the meta device, on which torch does in-place operations without a word: ``average.add_(absent)``
leaves ``average`` as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_smddp._compat.torch import without_torch_function
from lightning_smddp.pipeline.capture.ops import Kind, kind_of, name_of, sets_flag
from lightning_smddp.pipeline.capture.patches import user_location
from lightning_smddp.wire.pytree import leaves

_HARMLESS = {Kind.METADATA, Kind.WATCHER, Kind.LIKE}
_allowed = threading.local()  # .depth


class AbsentParameterError(RuntimeError):
    """A parameter of another rank was used outside of hooks, where its values cannot be had."""


class AbsentParameter(nn.Parameter):
    """A parameter without values: shape, dtype and flags can be asked for, and nothing else."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each torch function that gets such a parameter, unless a mode comes first."""
        kwargs = kwargs or {}
        hidden = getattr(function, "__name__", "") in ("__get__", "__set__") and name_of(function).startswith("_")
        harmless = hidden or kind_of(function, args) in _HARMLESS or sets_flag(function)
        with without_torch_function():
            if harmless or name_of(function) == "grad" or getattr(_allowed, "depth", 0) > 0:
                return function(*args, **kwargs)
            absent = next((leaf for leaf in leaves((args, kwargs)) if _is_absent(leaf)), None)
            if absent is None:
                return function(*args, **kwargs)
        name, rank = vars(absent)["_held_by"]
        raise AbsentParameterError(
            f"{name_of(function)} at {user_location()} uses parameter {name!r}, whose values are on rank {rank} of "
            "the pipeline. Hooks and callbacks of Lightning may use all parameters, on all ranks alike; other code may "
            "not. Do it in a hook such as `on_train_batch_end`."
        )


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, AbsentParameter) and leaf.is_meta


def mark_absent(parameter: nn.Parameter, name: str, rank: int) -> None:
    """``parameter``, on the meta device, is called ``name``, and ``rank`` of the pipeline has its values.

    Parameters of other classes than torch's own are left alone.
    """
    if type(parameter) is nn.Parameter:
        vars(parameter)["_held_by"] = (name, rank)
        parameter.__class__ = AbsentParameter


def mark_present(parameter: Tensor) -> None:
    """Make an absent parameter an ordinary one again, once memory with values is attached."""
    del vars(parameter)["_held_by"]
    parameter.__class__ = nn.Parameter


@contextmanager
def may_be_absent() -> Iterator[None]:
    """Around code of torch or ours that goes over all parameters, and may do nothing to absent ones."""
    _allowed.depth = getattr(_allowed, "depth", 0) + 1
    try:
        yield
    finally:
        _allowed.depth -= 1
