"""Flat memory for the gradients of some parameters, in which they accumulate in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_smddp._compat.torch import write_count


class GradientBucket:
    """Has what ``GradientSynchronizer.average`` asks of DDP's ``GradBucket``.

    Each parameter's ``.grad`` is a view of the bucket from :meth:`begin` on, so that backward adds to it in place.

    Args:
        number: its position in the order of launches.
        parameters: of one dtype, on one device.
        last: whether no bucket follows.
    """

    def __init__(self, number: int, parameters: list[nn.Parameter], last: bool) -> None:
        first = parameters[0]
        self._number, self._parameters, self._last = number, parameters, last
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        # Each gradient is a slice of the flat memory, in its parameter's own strides. `used` tells by the count of
        # writes whether backward has come to a slice; `.data` gives each a count of its own (views share one).
        self._views = [
            part.as_strided(parameter.shape, _strides(parameter)).data
            for parameter, part in zip(parameters, self._flat.split(sizes), strict=True)
        ]
        self._kept = [False] * len(parameters)
        self._written = [0] * len(parameters)

    def index(self) -> int:
        """Its position in the order of launches."""
        return self._number

    def buffer(self) -> Tensor:
        """All gradients, one after the other."""
        return self._flat

    def parameters(self) -> list[nn.Parameter]:
        """In the order of :meth:`buffer`."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether no bucket follows."""
        return self._last

    def begin(self, keep: bool) -> None:
        """Let gradients flow in: added to what ``.grad`` holds, or to zero."""
        self._kept = [keep and parameter.grad is not None for parameter in self._parameters]
        keeps_some = any(self._kept)
        if keeps_some:
            self.collect()
        else:
            self._flat.zero_()  # one kernel instead of one for each parameter
        for parameter, view, kept in zip(self._parameters, self._views, self._kept, strict=True):
            if keeps_some and not kept:
                view.zero_()
            parameter.grad = view
        self._written = [write_count(view) for view in self._views]

    def collect(self) -> None:
        """Take in gradients that someone put elsewhere, as ``backward(create_graph=True)`` does."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None and not _same_memory(parameter.grad, view):
                view.copy_(parameter.grad)
                parameter.grad = view

    def used(self) -> list[bool]:
        """Which parameters have a gradient, be it zero."""
        counts = zip(self._views, self._written, self._kept, strict=True)
        return [kept or write_count(view) != before for view, before, kept in counts]

    def hand_out(self, used: Iterable[bool]) -> None:
        """Set ``.grad``: the view, or None for parameters without a gradient."""
        for parameter, view, is_used in zip(self._parameters, self._views, used, strict=True):
            if is_used:
                parameter.grad = view
            else:
                parameter.grad = None


def assign_buckets(parameters: list[nn.Parameter], cap_bytes: int) -> list[GradientBucket]:
    """Buckets of at most ``cap_bytes`` (but one parameter at least), in the order in which backward fills them.

    That is taken to be the reverse of the module's.
    """
    filling: dict[torch.dtype, list[tuple[int, nn.Parameter]]] = {}  # the open bucket of each dtype
    full: list[list[tuple[int, nn.Parameter]]] = []
    for position, parameter in enumerate(reversed(parameters)):
        members = filling.setdefault(parameter.dtype, [])
        elements = parameter.numel() + sum(member.numel() for _, member in members)
        if members and elements * parameter.dtype.itemsize > cap_bytes:
            full.append(members)
            members = filling[parameter.dtype] = []
        members.append((position, parameter))
    # A bucket can start when its last gradient is there, so buckets are numbered by their last members. Launches
    # follow the numbers on all replicas: collectives in another order on another rank would never match.
    contents = sorted([*full, *filling.values()], key=lambda members: members[-1][0])
    buckets = []
    for number, members in enumerate(contents):
        is_last = number == len(contents) - 1
        buckets.append(GradientBucket(number, [parameter for _, parameter in members], is_last))
    return buckets


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own where they leave no holes, as optimizers are fastest with equal ones; else contiguous."""
    return torch.empty_like(parameter, device="meta").stride()


def _same_memory(gradient: Tensor, view: Tensor) -> bool:
    return not gradient.is_sparse and gradient.data_ptr() == view.data_ptr()
