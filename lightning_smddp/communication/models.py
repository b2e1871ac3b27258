"""All ranks have to train the same model: found out at setup, not by an abort in the first backward."""

from __future__ import annotations

import hashlib
import json

import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication.compression import Compression, check_compressible
from lightning_smddp.communication.messages import gather_json
from lightning_smddp.communication.topology import Topology


def describe_parameters(module: nn.Module) -> list[str]:
    """One line for each parameter: name, shape, dtype, and whether it is trained."""
    return [
        f"{name}: shape {tuple(p.shape)}, {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in module.named_parameters()
    ]


def check_trainable(module: nn.Module) -> None:
    """Raise ``ValueError`` if there is nothing to train."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        count = sum(1 for _ in module.parameters())
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient ({count} parameters in all), so there "
            "is nothing to synchronise. Unfreeze a parameter, or create the layers in `__init__` or `configure_model`."
        )


def check_compression(module: nn.Module, compression: Compression | None) -> None:
    """Raise ``ValueError`` if a gradient cannot be compressed."""
    if compression is not None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                check_compressible(parameter.dtype, f"The gradient of {name!r}")


def check_same_model(module: nn.Module, group: dist.ProcessGroup, device: torch.device, topology: Topology) -> None:
    """Raise ``ValueError`` on every rank if parameters differ between ranks, naming the first. Collective."""
    lines = describe_parameters(module)
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    digests = gather_json(digest, group, device)
    if len(set(digests)) == 1:
        return
    models = gather_json(lines, group, device)
    other = next(rank for rank, value in enumerate(digests) if value != digests[0])
    first, second = models[0], models[other]
    position = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    if position is None:
        position = min(len(first), len(second))
    here, there = (model[position] if position < len(model) else "nothing" for model in (first, second))
    raise ValueError(
        f"The models differ between ranks. The first difference is parameter {position}: "
        f"{topology.describe(0)} has {here}; {topology.describe(other)} has {there}. "
        f"({len(first)} and {len(second)} parameters in all.) Build the same model on every rank: nothing in its "
        "construction may depend on the rank, the data of one rank, or unordered iteration."
    )
