"""All ranks have to train the same model: found out at setup, not by an abort in the first backward."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_smddp.communication.compression import Compression, check_compressible
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.topology import Topology
from lightning_smddp.wording import counted


def describe_parameters(module: nn.Module) -> list[str]:
    """One line for each parameter: name, shape, dtype, and whether it is trained."""
    lines = []
    for name, parameter in module.named_parameters():
        line = f"{name}: shape {tuple(parameter.shape)}, {parameter.dtype}"
        if not parameter.requires_grad:
            line += ", frozen"
        lines.append(line)
    return lines


def describe_buffers(module: nn.Module) -> list[str]:
    """One line for each buffer: name, shape, dtype."""
    lines = []
    for name, buffer in module.named_buffers():
        lines.append(f"{name}: shape {tuple(buffer.shape)}, {buffer.dtype}")
    return lines


def require_initialized(module: nn.Module) -> None:
    """Raise ``ValueError`` if a lazy layer has not seen an input yet, which tells it its shape."""
    for name, parameter in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(parameter):
            layer, _, _ = name.rpartition(".")
            kind = type(module.get_submodule(layer)).__name__
            raise ValueError(
                f"{name!r} of {type(module).__name__} has no shape yet: {layer or 'the module'!r} is a {kind}. Ranks "
                "have to know the model before its first batch. Call the module once with an example in `__init__` or "
                "`configure_model`, such as `with torch.no_grad(): self(torch.zeros(1, 8))`, the same on every rank."
            )


def check_trainable(module: nn.Module) -> None:
    """Raise ``ValueError`` if there is nothing to train."""
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient "
            f"({counted(len(parameters), 'parameter')} in all), so there is nothing to synchronise. Unfreeze a "
            "parameter, or create the layers in `__init__` or `configure_model`."
        )


def check_compression(module: nn.Module, compression: Compression | None) -> None:
    """Raise ``ValueError`` if a gradient cannot be compressed."""
    if compression is None:
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            check_compressible(parameter.dtype, f"The gradient of {name!r}")


def check_same_model(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    topology: Topology,
) -> None:
    """Raise ``ValueError`` on every rank if parameters or buffers differ, naming the first. Collective."""
    # A digest is short. The lines themselves are sent only when there is an error to be described.
    lines = [describe_parameters(module), describe_buffers(module)]
    digests = gather(_digest(lines), group)
    other = _first_other(digests)
    if other is None:
        return
    models = gather(lines, group)
    parameters, buffers = models[0]
    other_parameters, other_buffers = models[other]
    kind, first, second = "parameter", parameters, other_parameters
    if parameters == other_parameters:
        kind, first, second = "buffer", buffers, other_buffers
    position, here, there = _first_difference(first, second)
    raise ValueError(
        f"The models differ between ranks. The first difference is {kind} {position}: "
        f"{topology.describe(0)} has {here}; {topology.describe(other)} has {there}. "
        f"({len(first)} and {len(second)} {kind}s in all.) Build the same model on every rank: nothing in its "
        "construction may depend on the rank, the data of one rank, or unordered iteration."
    )


def describe_optimizers(module: nn.Module, optimizers: Sequence[Any], schedulers: Sequence[str]) -> list[str]:
    """Lines for each optimizer, each of its groups of parameters with its settings, and each scheduler."""
    # A digest of the names, as a group may have thousands of parameters, and the first and the last one for messages.
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    lines = []
    for number, optimizer in enumerate(optimizers):
        plain = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper
        lines.append(f"optimizer {number} is {type(plain).__name__} with {counted(len(plain.param_groups), 'group')}")
        for index, group in enumerate(plain.param_groups):
            where = f"group {index} of optimizer {number}"
            members = []
            for parameter in group["params"]:
                members.append(names.get(id(parameter), "a tensor that is no parameter of the module"))
            span = "nothing"
            if members:
                span = f"{members[0]} to {members[-1]}"
            digest = _digest(members)[:8]
            lines.append(f"{counted(len(members), 'parameter')}, {span} (digest {digest}), in {where}")
            for key in sorted(group):
                if key not in ("params", "param_names"):
                    lines.append(f"{key}={_setting(group[key])} in {where}")
    for number, text in enumerate(schedulers):
        lines.append(f"scheduler {number}: {text}")
    return lines


def check_same_optimizers(
    module: nn.Module,
    optimizers: Sequence[Any],
    schedulers: Sequence[str],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise ``ValueError`` on every rank if optimizers differ, naming the first difference. Collective.

    Args:
        module: whose parameters they change.
        optimizers: of this rank.
        schedulers: of this rank, in words.
        group: all ranks.
        device: for messages.
    """
    lines = describe_optimizers(module, optimizers, schedulers)
    gathered = gather(lines, group)
    other = _first_other(gathered)
    if other is None:
        return
    _, here, there = _first_difference(gathered[0], gathered[other])
    raise ValueError(
        f"The optimizers differ between ranks, so their weights would part. Rank 0 has: {here}. Rank {other} has: "
        f"{there}. Return the same from `configure_optimizers` on every rank."
    )


def check_same_lengths(
    batches: float,
    epoch: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise ``ValueError`` on every rank if they have different numbers of training batches. Collective.

    Args:
        batches: of this rank in this epoch; inf if nobody knows.
        epoch: for the message.
        group: all ranks.
        device: for messages.
    """
    counts = gather(batches, group)
    ranks_of: dict[float, list[int]] = {}
    for rank, count in enumerate(counts):
        ranks_of.setdefault(count, []).append(rank)
    if len(ranks_of) == 1:
        return
    texts = []
    for count, ranks in sorted(ranks_of.items()):
        number = "an unknown number"
        if count != math.inf:
            number = str(int(count))
        noun = "rank"
        if len(ranks) > 1:
            noun = "ranks"
        listed = ", ".join([str(rank) for rank in ranks])
        texts.append(f"{number} on {noun} {listed}")
    least = int(min(ranks_of))  # there are two numbers, so one is known
    raise ValueError(
        f"The ranks have different numbers of training batches in epoch {epoch}: {', '.join(texts)}. They average "
        "gradients after each batch, so the epoch would not end on all of them. Give every rank as many samples "
        "(Lightning's own sampler does; DistributedSampler pads, or drops with drop_last=True), or set "
        f"limit_train_batches={least}."
    )


def _digest(lines: Any) -> str:
    text = json.dumps(lines)
    return hashlib.sha256(text.encode()).hexdigest()


def _first_other(gathered: Sequence[Any]) -> int | None:
    """The first rank that has told something else than rank 0; None if all agree."""
    for rank, told in enumerate(gathered):
        if told != gathered[0]:
            return rank
    return None


def _first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[int, str, str]:
    """The position where two lists that are not equal differ first, and what each has there."""
    pairs = itertools.zip_longest(one, other, fillvalue="nothing")
    for position, (here, there) in enumerate(pairs):
        if here != there:
            return position, here, there
    raise AssertionError("the lists are equal")


def _setting(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return repr(value)
