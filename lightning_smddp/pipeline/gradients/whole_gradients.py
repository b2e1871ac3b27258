"""Gradients of a model that is whole on every rank: their mean over some ranks, after each backward pass.

There is no bucket, nor overlap: it serves steps that cannot be cut, which may start any number of backward passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp._compat.torch import write_count
from lightning_smddp.communication.nonfinite import bad_gradients

_BUCKET_BYTES = 25 * 2**20  # as of DDP


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
        self._found: dict[str, str] = {}
        self._spoiled = False
        self._count = 0  # of averages
        self._seen = self._state()

    def average(self) -> None:
        """Set ``.grad`` to its mean where some rank's has grown. Collective.

        Raises:
            ValueError: on every rank: a gradient is sparse, or ranks are at other backward passes.
        """
        parameters = list(self.module.named_parameters())
        flags = []
        sparse = 0.0
        for name, parameter in parameters:
            gradient = parameter.grad
            if gradient is None or self._is_seen(name, gradient):
                flags.append(0.0)
                continue
            flags.append(1.0)
            if gradient.is_sparse:
                sparse = 1.0
        self._count += 1
        # One MAX tells all ranks which gradients somebody's backward has changed, and whether all are at the same
        # backward pass: the lowest count is minus the highest of the negated ones.
        numbers = [*flags, sparse, self._count, -self._count]
        message = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self.group)
        *answers, any_sparse, highest, lowest = message.tolist()
        self._require_together(highest, -lowest, any_sparse)
        chosen: list[tuple[str, nn.Parameter]] = []
        for named, flag in zip(parameters, answers, strict=True):
            if flag > 0:
                chosen.append(named)
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
        """Average the gradients of ``bucket``, of one type, in one flat tensor. Collective."""
        gradients = [_flat(parameter) for parameter in bucket.values()]
        total = torch.cat(gradients)
        dist.all_reduce(total, group=self.group)
        total.div_(self.group.size())
        # A NaN or inf of any rank is in the mean, and in its sum. Only then this rank looks which of its own it is.
        if self.watching and not bool(total.sum().isfinite()):
            self._spoiled = True
            self._found.update(bad_gradients(bucket.items()) or {})
        sizes = [flat.numel() for flat in gradients]
        for parameter, part in zip(bucket.values(), total.split(sizes), strict=True):
            if parameter.is_complex():
                part = torch.view_as_complex(part.view(-1, 2))
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.detach().copy_(part.view(parameter.shape))

    def take_nonfinite(self) -> dict[str, str] | None:
        """What was not finite in this rank's own gradients since the last call; None if no rank has found anything."""
        if not self._spoiled:
            return None
        found = self._found
        self._found = {}
        self._spoiled = False
        return found

    def _state(self) -> dict[str, tuple[weakref.ref[Tensor], int]]:
        """Each gradient, and how often it was written."""
        # A weak reference, so that gradients that are set to None are freed; the count tells writes in place.
        state: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                state[name] = (weakref.ref(gradient), write_count(gradient))
        return state

    def _is_seen(self, name: str, gradient: Tensor) -> bool:
        """Whether it is what it was behind the last average."""
        if name not in self._seen:
            return False
        reference, count = self._seen[name]
        return reference() is gradient and write_count(gradient) == count


def _flat(parameter: nn.Parameter) -> Tensor:
    """The gradient as a vector of real numbers, two for each complex one; zeros where there is none."""
    if parameter.grad is None:
        gradient = torch.zeros_like(parameter).detach()
    else:
        gradient = parameter.grad.detach()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient.reshape(-1)


def _buckets(parameters: Sequence[tuple[str, nn.Parameter]]) -> Iterator[dict[str, nn.Parameter]]:
    """Parts of one type each, and not much larger than a bucket, in the same order on all ranks."""
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
    for dtype in sorted(by_dtype, key=str):
        bucket: dict[str, nn.Parameter] = {}
        size = 0
        for name, parameter in by_dtype[dtype]:
            bucket[name] = parameter
            size += parameter.numel() * parameter.dtype.itemsize
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket = {}
                size = 0
        if bucket:
            yield bucket
