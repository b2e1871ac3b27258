"""NaN and inf in gradients: seen before a weight takes them in, with no message more while all is well.

Each rank looks at its own gradients once, before they are averaged: one sum over memory that backward has just
written. A rank that finds something notes which parameters, and sets the bucket's first element to NaN. Averaging
carries that to everyone, so afterwards each rank reads one element of each bucket, and all of them see the same.

Averaging through shared memory looks by itself, at sums that are still in cache, and tells all ranks.

Code of the user's that cleans gradients has to find what ``ddp`` would show it: with ``marks=False`` nothing is set to
NaN, and whoever steps the optimizer looks at the gradients themselves, after that code.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lightning_smddp.communication.errors import NonFiniteGradientError
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.shared_memory import sum_dtype
from lightning_smddp.communication.tensors import from_numbers
from lightning_smddp.wording import counted

_SHOWN = 3  # parameters of a rank, in messages


class Bucket(Protocol):
    """What is used of DDP's ``GradBucket``."""

    def index(self) -> int: ...  # noqa: D102
    def buffer(self) -> Tensor: ...  # noqa: D102
    def parameters(self) -> list[Tensor]: ...  # noqa: D102


class NonFiniteWatch:
    """Looks at the buckets of one module, in each step.

    Args:
        names: of the parameters, by ``id``.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.on = False
        self.marks = True  # False: averages stay as they are, for code that cleans them; `spoiled` knows nothing then
        self.findings: dict[str, str] = {}  # of this rank alone, in this step: parameter -> what is wrong
        self._buckets: dict[int, Tensor] = {}
        self._sums: list[tuple[Tensor, Tensor, Bucket]] = []  # on devices: sum, first element, neither known yet

    def begin(self) -> None:
        """A new backward pass: the buckets fill again."""
        self._buckets.clear()
        self._sums.clear()
        self.findings = {}

    def look(self, bucket: Bucket) -> None:
        """Look for NaN and infinity in this rank's gradients of a bucket, before they are averaged."""
        tensor = bucket.buffer()
        self._buckets[bucket.index()] = tensor
        values = _values(tensor)
        if values.numel() == 0:
            return
        total = total_of(values)
        if tensor.device.type != "cpu":
            # Asking whether it is finite would wait for the device: so the mark is set by the device, and what it is
            # for is kept until somebody asks. `first` is a view: the clone is what was there before the mark.
            first = values.view(-1)[:1]
            self._sums.append((total, first.clone(), bucket))
            if self.marks:
                marked = torch.where(total.isfinite(), first, torch.nan)
                first.copy_(marked)
        elif not total.isfinite():
            found = _by_parameter(bucket, values, self.names)
            self.findings |= found
            # Nothing is found where finite values are huge: only their sum is not finite.
            if found and self.marks and not tensor.is_sparse:
                values.view(-1)[0] = torch.nan

    def not_finite(self, bucket: Bucket) -> None:
        """Averaging has found that ``bucket`` is not finite, on all ranks, and left there what this rank brought."""
        tensor = bucket.buffer()
        self.findings |= _by_parameter(bucket, tensor, self.names)
        self._buckets[bucket.index()] = tensor.fill_(torch.nan)  # what ranks brought is not the same on all

    def spoiled(self) -> bool:
        """Whether some rank has found something: the same answer on all ranks, after averaging."""
        marks = [_mark_of(tensor) for tensor in self._buckets.values()]
        if not marks:
            return False
        if len(marks) == 1 or marks[0].device.type == "cpu":
            return not all(bool(mark.isfinite()) for mark in marks)
        finite = torch.stack([mark.isfinite() for mark in marks])  # so that the host waits for a device once
        return not bool(finite.all())

    def take_findings(self) -> dict[str, str]:
        """What this rank has found since the last call."""
        # On a device nobody has looked further than at sums. By now the averages are in the buckets, and this rank's
        # own values are gone: name what is not finite in the averages, where its own sum was not finite.
        for total, first, bucket in self._sums:
            if not bool(total.isfinite()):
                values = bucket.buffer().clone()
                if not values.is_sparse:
                    values.view(-1)[:1] = first  # without this rank's mark
                self.findings |= _by_parameter(bucket, values, self.names)
        found, self.findings = self.findings, {}
        self.begin()
        return found


def total_of(tensor: Tensor) -> Tensor:
    """A sum that is finite if all elements are, unless finite ones are huge."""
    wide = sum_dtype(tensor.dtype)
    if wide != tensor.dtype:
        return tensor.sum(dtype=wide)
    return tensor.sum()


def bad_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str] | None:
    """Name -> what is wrong, of the gradients that are not finite; None if all are, which takes one look."""
    held = []
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        values = _values(parameter.grad)
        if values.numel() > 0:
            held.append((name, values))
    if not held:
        return None
    if _all_finite([values for _, values in held]):
        return None
    return _described(held) or None


def _all_finite(tensors: list[Tensor]) -> bool:
    """One look; finite values that are huge may count as not finite."""
    if tensors[0].is_cuda:
        return bool(get_total_norm(tensors, inf).isfinite())  # few kernels
    totals = torch.stack([total_of(tensor) for tensor in tensors])
    return bool(totals.isfinite().all())


def agreed(found: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether any rank has found something. Collective."""
    flag = from_numbers([found], torch.float32, device)
    dist.all_reduce(flag, group=group)
    return bool(flag > 0)


def diagnosis(
    found: Mapping[str, str],
    where: str,
    group: dist.ProcessGroup,
) -> str:
    """Who has found what, in one line, the same on all ranks. Collective.

    Args:
        found: on this rank: parameter -> what is wrong.
        where: the step.
        group: the ranks that know that something was found.
    """
    gathered = gather((dist.get_rank(), socket.gethostname(), found), group)
    parts = []
    for rank, host, ranks_findings in gathered:
        if ranks_findings:
            parts.append(f"on rank {rank} (host {host}) {_listed(ranks_findings)}")
    if not parts:
        parts = ["in the average over the ranks, though each rank's own are finite: their sum is too large"]
    return f"Gradients are not finite in {where}: {'; '.join(parts)}."


def refuse(text: str) -> NonFiniteGradientError:
    """The error, with what can be done."""
    return NonFiniteGradientError(
        f"{text} The step was not taken. Look at that rank's batch and at the learning rate, `detect_anomaly=True` "
        "shows the operation; `ReliabilityOptions(on_nonfinite='skip')` leaves such steps out on all ranks."
    )


def _listed(found: Mapping[str, str]) -> str:
    texts = [f"{name} ({text})" for name, text in found.items()]
    shown = ", ".join(texts[:_SHOWN])
    more = len(found) - _SHOWN
    if more <= 0:
        return shown
    return f"{shown} and {more} more parameters"


def _by_parameter(bucket: Bucket, values: Tensor, names: Mapping[int, str]) -> dict[str, str]:
    """What is wrong with the parameters' parts of ``values``, which are those of ``bucket``, by name."""
    parameters = bucket.parameters()
    parts: Sequence[Tensor] = [values]  # of one parameter also where it is sparse
    if len(parameters) > 1:
        parts = values.split([parameter.numel() for parameter in parameters])
    titles = [names.get(id(parameter), "an unnamed parameter") for parameter in parameters]
    return _described(zip(titles, parts, strict=False))


def _described(held: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """What is wrong with those that are not finite, by name."""
    found = {}
    for name, values in held:
        text = _describe(values)
        if text is not None:
            found[name] = text
    return found


def _describe(values: Tensor) -> str | None:
    """``nan in 3 of 16 elements``; None if all are finite."""
    not_finite = ~values.isfinite()
    bad = int(not_finite.sum())
    if bad == 0:
        return None
    kind = "inf"
    if bool(values.isnan().any()):
        kind = "nan"
    return f"{kind} in {bad} of {counted(values.numel(), 'element')}"


def _values(gradient: Tensor) -> Tensor:
    if hasattr(gradient, "to_local"):  # a DTensor: this rank looks at its own part
        gradient = gradient.to_local()
    if gradient.is_sparse:
        return gradient.coalesce().values()
    return gradient


def _mark_of(bucket: Tensor) -> Tensor:
    """What is not finite where a rank has found something: of a sparse average, which has no mark, all of it."""
    if bucket.is_sparse:
        return total_of(_values(bucket))
    return bucket.view(-1)[0]
