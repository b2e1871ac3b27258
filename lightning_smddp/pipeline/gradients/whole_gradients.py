"""Gradients of a model that is whole on every rank: their mean over some ranks, after each backward pass.

There is no bucket, nor overlap: it serves steps that cannot be cut, which may start any number of backward passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import write_count
from lightning_smddp.communication.nonfinite import bad_gradients

_BUCKET_BYTES = 25 * 2**20


class WholeGradients:
    """Averages what backward passes have added to the gradients of ``module``.

    A gradient that has grown since the last :meth:`average` is averaged as a whole: what it held before is equal on
    all ranks already, so the mean of the sums is the sum of the means. A rank without a gradient counts as zero where
    another one has it.

    Args:
        module: whole on each rank.
        group: the ranks to average over.
        device: where ``group``'s collectives take their tensors from.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.module = module
        self.group = group
        self.device = device
        self.watching = False  # for NaN and inf
        self._found: dict[str, str] | None = None
        self._spoiled = False
        self._count = 0  # of averages
        self._seen = self._state()

    def average(self) -> None:
        """Set ``.grad`` to its mean where some rank's has grown. Collective.

        Raises:
            ValueError: on every rank: a gradient is sparse, or ranks are at other backward passes.
        """
        every = dict(self.module.named_parameters())
        grown = set()
        for name, parameter in every.items():
            if parameter.grad is not None and not self._is_seen(name, parameter.grad):
                grown.add(name)
        self._count += 1
        flags = [float(name in grown) for name in every]
        sparse = float(any(_is_sparse(every[name]) for name in grown))
        # One MAX tells all ranks which gradients somebody's backward has changed, and whether all are at the same
        # backward pass: the lowest count is minus the highest of the negated ones.
        message = torch.tensor([*flags, sparse, self._count, -self._count], dtype=torch.float64, device=self.device)
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group)
        *answers, any_sparse, highest, lowest = message.tolist()
        self._require_together(highest, -lowest, any_sparse)
        chosen = {name: every[name] for name, flag in zip(every, answers, strict=True) if flag > 0}
        for bucket in _buckets(chosen):
            self._average(bucket)
        self._seen = self._state()

    def _require_together(self, highest: float, lowest: float, any_sparse: float) -> None:
        if highest != lowest:
            raise ValueError(
                f"A replica has come to its backward pass {highest:.0f}, another one to its {lowest:.0f}: "
                "`training_step` has to start as many backward passes on each replica, and must not return None on one "
                "of them alone."
            )
        if any_sparse:
            raise ValueError(
                "A gradient is sparse, which replicas of a step that cannot be pipelined do not average. Use "
                "`sparse=False` in the embedding, or one replica (pipeline_parallel_size=None)."
            )

    def _average(self, bucket: Mapping[str, nn.Parameter]) -> None:
        gradients = [_flat(p) for p in bucket.values()]
        total = torch.cat(gradients)
        dist.all_reduce(total, group=self.group)
        total.div_(self.group.size())
        if self.watching and not bool(total.sum().isfinite()):
            self._spoiled = True
            self._found = {**(self._found or {}), **(bad_gradients(bucket.items()) or {})}
        begin = 0
        for parameter, flat in zip(bucket.values(), gradients, strict=True):
            part = total[begin : begin + flat.numel()]
            begin += flat.numel()
            if parameter.is_complex():
                part = torch.view_as_complex(part.view(-1, 2))
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.detach().copy_(part.view(parameter.shape))

    def take_nonfinite(self) -> dict[str, str] | None:
        """What was not finite in this rank's own gradients since the last call; None if no rank has found anything."""
        found, self._found = self._found, None
        spoiled, self._spoiled = self._spoiled, False
        if not spoiled:
            return None
        return found or {}

    def _state(self) -> dict[str, tuple[weakref.ref[Tensor], int]]:
        """Each gradient, and how often it was written."""
        held = [(name, p.grad) for name, p in self.module.named_parameters() if p.grad is not None]
        return {name: (weakref.ref(gradient), write_count(gradient)) for name, gradient in held}

    def _is_seen(self, name: str, gradient: Tensor) -> bool:
        """Whether it is what it was behind the last average."""
        reference, count = self._seen.get(name, (None, 0))
        return reference is not None and reference() is gradient and write_count(gradient) == count


def _is_sparse(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _flat(parameter: nn.Parameter) -> Tensor:
    """The gradient as a vector of real numbers, two for each complex one; zeros where there is none."""
    if parameter.grad is None:
        gradient = torch.zeros_like(parameter).detach()
    else:
        gradient = parameter.grad.detach()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient.reshape(-1)


def _buckets(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """Parts of one type each, and not much larger than a bucket."""
    ordered = sorted(parameters.items(), key=lambda item: str(item[1].dtype))  # stable: the same on all ranks
    for _, alike in groupby(ordered, key=lambda item: item[1].dtype):
        bucket: dict[str, nn.Parameter] = {}
        size = 0
        for name, parameter in alike:
            bucket[name] = parameter
            size += parameter.numel() * parameter.dtype.itemsize
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = {}, 0
        if bucket:
            yield bucket
