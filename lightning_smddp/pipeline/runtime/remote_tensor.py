"""Tensors of other stages: a shape and a type without numbers.

torch calls the class of a tensor for each function that gets it (`__torch_function__`), so a stage's run hears of every
operation on what is elsewhere, and of no other: all else is plain PyTorch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_smddp._compat.torch import READ_NUMBER, without_subclass_functions
from lightning_smddp.pipeline.capture.ops import Kind, kind_of, name_of, user_location
from lightning_smddp.pytree import leaves, map_leaves

OTHER_PATH = (
    "When it was traced it took another path. What the step does before its last module may not depend on "
    "torch's random numbers, or on values of tensors that modules made."
)
_TEXT = {"__format__", "__repr__", "__str__"}


class ReplayError(RuntimeError):
    """The step took another path than when it was traced."""


class _Active(threading.local):
    """Of this thread: ``run`` is the ``StageRun`` (of ``step_run.py``) that is under way, or None."""

    run: Any = None


ACTIVE = _Active()


class RemoteTensor(Tensor):
    """A tensor of another stage, or one that came from there and is handed out once the stage's own part has begun.

    Shape, strides, dtype and ``requires_grad`` are answered by torch itself.

    Attributes:
        value: which one of the graph's.
        run: the run that it belongs to, and no other.
    """

    value: int
    run: Any

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each function that gets one of these."""
        kwargs = kwargs or {}
        kind = kind_of(function, args)
        if kind is Kind.METADATA:
            return _answer(function, args, kwargs)
        found = leaves((args, kwargs))
        # Its own run, not the active one: a checkpoint's second run, in the backward pass, has none.
        remote = [leaf for leaf in found if type(leaf) is RemoteTensor]
        run = remote[0].run
        if kind is Kind.LIKE and len(remote) == 1 and remote[0] is found[0]:
            return function(*map_leaves(run.pattern, args), **map_leaves(run.pattern, kwargs))
        if kind is Kind.WATCHER and not run.has_begun:
            # Of its gradient: the stage that makes the tensor has the hook.
            return None if name_of(function) == "retain_grad" else RemovableHandle(OrderedDict())
        return run.operation(function, args, kwargs, found)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is READ_NUMBER:  # a tensor in place of a number, as `torch.full_like(x, fill)` takes it
            real = args[0].run.real(args[0])
            if real is not args[0]:
                return function(real)
        raise ReplayError(
            f"{function} at {user_location()} meets a tensor of another stage in a way that cannot be followed. Put "
            "this code, and what made the tensor, into one module."
        )


def _answer(function: Any, args: Any, kwargs: Any) -> Any:
    """What a question that needs no numbers is answered."""
    subject = args[0] if args else None
    if type(subject) is RemoteTensor and name_of(function) in _TEXT:  # for a log: the numbers if they are here
        real = subject.run.real(subject)
        if real is subject:
            return f"<tensor of shape {tuple(subject.shape)} on another stage>"
        return function(real, *args[1:], **kwargs)
    with without_subclass_functions():
        return function(*args, **kwargs)
