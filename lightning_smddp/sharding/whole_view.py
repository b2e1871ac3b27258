"""What user code computes of divided tensors is what it would compute of the whole ones.

By itself a ``DTensor`` is no drop-in for user code: ``parameter.grad.norm().item()`` is the norm of this rank's share,
and a divided weight cannot be multiplied with a plain activation. Within the view, operators get whole tensors in their
place, and give plain ones; what writes to a divided tensor (``parameter.mul_(0.99)``) writes each rank's share.

It is collective: all ranks have to compute the same. Gradients that come back are averaged over ranks, as all are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_smddp._compat.fsdp import call_as_is, dtensor_functions
from lightning_smddp.pytree import leaves, map_leaves
from lightning_smddp.sharding.whole_states import all_of, own_part

# What is asked about a tensor, or does not look at its values.
_AS_IT_IS = frozenset({
    "__delete__", "__get__", "__hash__", "__len__", "__repr__", "__set__", "backward", "data_ptr", "detach", "dim",
    "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_set_to", "ndimension",
    "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
    "storage_offset", "stride", "untyped_storage",
})  # fmt: skip
_WRITING = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__"})
_DRAWING = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
})  # fmt: skip


class WholeView:
    """Lets operators of ``DTensor`` be handled by :meth:`inside`, while it is installed."""

    def __init__(self) -> None:
        self._on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Until the end of a run: the view can be entered."""
        with dtensor_functions(self._handle):
            yield

    @contextmanager
    def inside(self, on: bool = True) -> Iterator[None]:
        """User code runs in here; with ``on=False`` code that is written for shares, within it."""
        before, self._on = self._on, on
        try:
            yield
        finally:
            self._on = before

    # In the place of `DTensor.__torch_function__`: it gets each operator that has a divided tensor among its arguments.
    def _handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", "")
        if not self._on or name in _AS_IT_IS:
            return call_as_is(function, args, kwargs)
        # Handlers use operators of DTensor themselves, which must not come here again: they run outside of the view.
        with self.inside(False):
            if name == "__setitem__" and isinstance(args[0], DTensor):
                return _set_item(*args)
            written, *_ = (*args, *kwargs.values())
            # What draws, and functions of `torch.nn.init`, which come with keywords alone, fill the whole tensor: by
            # itself each rank would draw the same numbers for its share.
            fills = name in _DRAWING or (_writes(name) and not args)
            target = written if fills else None
            if isinstance(kwargs.get("out"), DTensor):
                target = kwargs.pop("out")
            # What else writes has to reach the shares themselves, which would not see what a gathered copy gets. All
            # others compute with gathered values.
            if _writes(name) and not fills and any(isinstance(leaf, DTensor) for leaf in leaves(written)):
                shares = [_shares(operand, written) for operand in args[1:]]
                return call_as_is(function, (written, *shares), kwargs)
            result = function(*map_leaves(_whole, args), **map_leaves(_whole, kwargs))
            return _write(target, result) if isinstance(target, DTensor) else result


def _writes(name: str) -> bool:
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def _shares(value: Any, written: Any) -> Any:
    """An operand of an operator that writes to ``written``: of a whole tensor of its shape this rank's share."""
    if isinstance(value, (list, tuple)) and isinstance(written, (list, tuple)):
        return [_shares(one, other) for one, other in zip(value, written, strict=True)]
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if not isinstance(written, DTensor) or value.dim() == 0:
        return value
    return own_part(value.expand(written.shape), written)


def _set_item(divided: DTensor, index: Any, value: Any) -> None:
    # An index may reach any rank's share: it is written to a whole copy, of which each rank takes its own part back.
    with torch.no_grad():
        whole = all_of(divided)
        new = _whole(value)
        whole[map_leaves(_whole, index)] = new
    _write(divided, whole)


def _write(divided: DTensor, whole: Tensor) -> DTensor:
    """Each rank takes its part of ``whole``."""
    with torch.no_grad():
        divided.to_local().copy_(own_part(whole, divided).to_local())
    return divided


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    if value.requires_grad and torch.is_grad_enabled():
        apply: Callable[[Any], Any] = _Whole.apply
        return apply(value)
    return all_of(value)


class _Whole(torch.autograd.Function):
    """A divided tensor as a whole one. Gradients, which differ between ranks as their batches do, are averaged."""

    @staticmethod
    def forward(ctx: Any, divided: DTensor) -> Tensor:
        ctx.like = divided.detach()
        return all_of(divided)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # Autograd may hand the same gradient to other functions, so it is not written to. It is averaged, as FSDP2
        # averages gradients within a unit.
        mean = gradient.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(mean)
        return own_part(mean.div_(dist.get_world_size()), ctx.like)
