"""All ranks have to train the same model: found out at setup, not by an abort in the first backward."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_smddp.communication.objects import gather


def require_same(what: str, lines: Sequence[str], cure: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise ``ValueError`` on every rank if ``lines`` differ, with the first difference, and both sides. Collective.

    Args:
        what: that the lines describe, in plural.
        lines: of this rank.
        cure: a sentence.
        group: None: all ranks of the job.
    """
    # A digest is short. The lines themselves are sent only when there is an error to be described.
    digests = gather(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    everyones = gather(lines, group)
    pairs = itertools.zip_longest(everyones[0], everyones[other], fillvalue="nothing more")
    here, there = next((one, two) for one, two in pairs if one != two)
    raise ValueError(
        f"The {what} differ between ranks. The first difference: rank 0 has {here}; rank {other} has {there}. {cure}"
    )


def check_same_model(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise ``ValueError`` on every rank if parameters or buffers differ, naming the first. Collective."""
    cure = "Build the same one on every rank: nothing in it may depend on the rank, its data, or unordered iteration."
    lines = []
    for name, parameter in module.named_parameters():
        trained = "" if parameter.requires_grad else ", frozen"
        lines.append(f"parameter {name}: {_describe(parameter)}{trained}")
    lines += [f"buffer {name}: {_describe(buffer)}" for name, buffer in module.named_buffers()]
    require_same("models", lines, cure, group)


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}{' without values' if tensor.is_meta else ''}"


def check_same_optimizers(
    module: nn.Module,
    optimizers: Sequence[Any],
    schedulers: Sequence[str],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise ``ValueError`` on every rank if optimizers differ, naming the first difference. Collective.

    Args:
        module: whose parameters they change.
        optimizers: of this rank.
        schedulers: of this rank, in words.
        group: None: all ranks of the job.
    """
    lines = []
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        plain = getattr(optimizer, "optimizer", optimizer)  # without a wrapper of Lightning's or DeepSpeed's
        for index, options in enumerate(plain.param_groups):
            where = f"{type(plain).__name__} {number}, group {index}"
            for parameter in options["params"]:
                lines.append(f"{where}: {names.get(id(parameter), 'a parameter that is none of the module')}")
            for key in sorted(set(options) - {"params", "param_names"}):
                value = options[key]
                lines.append(f"{where}: {key}={value.tolist() if isinstance(value, Tensor) else value!r}")
    cure = "Their weights would part: return the same from `configure_optimizers` on every rank."
    require_same("optimizers", [*lines, *schedulers], cure, group)


def check_same_lengths(batches: float, epoch: int, group: dist.ProcessGroup | None = None) -> None:
    """Raise ``ValueError`` on every rank if they have different numbers of training batches. Collective.

    Args:
        batches: of this rank in this epoch; inf if nobody knows.
        epoch: for the message.
        group: None: all ranks of the job.
    """
    number = "an unknown number of them" if batches == math.inf else str(int(batches))
    cure = (
        "Give all as many samples, as Lightning's sampler does, or set `limit_train_batches` to the least; or write "
        "CommunicationOptions(uneven=...): 'stop' ends epochs there, 'join' goes on with the ranks that have data."
    )
    require_same(f"numbers of training batches in epoch {epoch}", [number], cure, group)


def require_initialized(module: nn.Module) -> None:
    """Raise ``ValueError`` if a lazy layer has not seen an input yet, which tells it its shape."""
    for name, parameter in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(parameter):
            cure = "Call it once with an example in `__init__` or `configure_model`: `self(torch.zeros(1, 8))`."
            raise ValueError(f"{name!r} of {type(module).__name__} is of a lazy layer and has no shape yet. {cure}")


def require_compressible(module: nn.Module) -> None:
    """Raise ``ValueError`` if a gradient cannot be rounded."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            cure = "Set `compression=None`, or make it real and floating-point."
            raise ValueError(f"The gradient of {name!r} is of {parameter.dtype} and cannot be compressed. {cure}")
