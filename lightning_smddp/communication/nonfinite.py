"""NaN and inf in gradients: seen before a weight takes them in, with no message more while all is well.

Before a step each rank looks at the averages once, and where something is found, again behind code of the user's that
may clean them. They are the same on all ranks, so all of them see the same, and the rank is named by its loss.

Averaging through shared memory looks by itself, at sums that are still in cache, and tells all ranks (``hook.py``):
where these are finite nobody looks again, unless code of the user's may have written them; else each rank knows what
it has brought.
"""

from __future__ import annotations

import socket
from cmath import inf, isfinite
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.shared_memory import sum_dtype
from lightning_smddp.communication.tensors import from_numbers
from lightning_smddp.wording import counted

_SHOWN = 3  # parameters, in messages


class NonFiniteGradientError(ValueError):
    """A gradient became NaN or infinite; the step was not taken."""


@dataclass(frozen=True)
class NonFinite:
    """Gradients that are not finite, in words, by what they belong to.

    Attributes:
        averages: the gradients of a step, by parameter.
        own: what this rank has brought, as far as that is known: gradients before averaging, its loss.
    """

    averages: Mapping[str, str]
    own: Mapping[str, str] = field(default_factory=dict)


def bad_gradients(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str] | None:
    """Name -> what is wrong, of the gradients that are not finite; None if all are, which takes one look."""
    held = [(name, _values(each.grad)) for name, each in parameters if each.grad is not None]
    held = [(name, values) for name, values in held if values.numel() > 0]
    if not held or _all_finite([values for _, values in held]):
        return None
    return _described(held) or None


def _all_finite(tensors: list[Tensor]) -> bool:
    """One look; finite values that are huge may count as not finite."""
    if not tensors[0].is_cpu:
        return bool(get_total_norm(tensors, inf).isfinite())  # few kernels
    return all(isfinite(tensor.sum(dtype=sum_dtype(tensor.dtype)).item()) for tensor in tensors)


def agreed(found: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether any rank has found something. Collective."""
    flag = from_numbers([found], torch.float32, device)
    dist.all_reduce(flag, group=group)
    return bool(flag > 0)


def diagnosis(found: NonFinite, where: str, group: dist.ProcessGroup) -> str:
    """What was found, and who has brought it, in one line, the same on all ranks. Collective.

    Args:
        found: on this rank.
        where: the step.
        group: the ranks that know that something was found.
    """
    averages: dict[str, str] = {}
    parts = []
    for rank, host, each in gather((dist.get_rank(), socket.gethostname(), found), group):
        averages |= each.averages
        if each.own:
            parts.append(f"on rank {rank} (host {host}) {_listed(each.own)}")
    if averages:
        parts.append(f"in the averages {_listed(averages)}")
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
    return f"{shown} and {more} more parameters" if more > 0 else shown


def brought(parameters: Sequence[Tensor], values: Tensor, names: Mapping[int, str]) -> dict[str, str]:
    """What is wrong with ``values``, the gradients of ``parameters`` one after the other; ``names`` goes by id."""
    parts = values.split([parameter.numel() for parameter in parameters])
    titles = [names.get(id(parameter), "an unnamed parameter") for parameter in parameters]
    return _described(zip(titles, parts, strict=True))


def _described(held: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """What is wrong with those that are not finite, by name: ``nan in 3 of 16 elements``."""
    found = {}
    for name, values in held:
        bad = int((~values.isfinite()).sum())
        if bad:
            kind = "nan" if bool(values.isnan().any()) else "inf"
            found[name] = f"{kind} in {bad} of {counted(values.numel(), 'element')}"
    return found


def _values(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor):  # this rank looks at its own part
        gradient = gradient.to_local()
    if gradient.is_sparse:
        return gradient.coalesce().values()
    return gradient
