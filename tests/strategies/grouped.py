"""Options of the strategies in one dict, put into the groups that they belong to."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightning_smddp import CommunicationOptions, PartitionOptions, ReliabilityOptions

GROUPS = {"communication": CommunicationOptions, "partition": PartitionOptions, "reliability": ReliabilityOptions}
OF_PIPELINES = "loss_weight"  # their own option; that of data parallelism is given in its group


def grouped(**options: Any) -> dict[str, Any]:
    """``grouped(verbose=False)`` is ``{"communication": CommunicationOptions(verbose=False)}``."""
    result = dict(options)
    for name, kind in GROUPS.items():
        names = [field.name for field in fields(kind) if field.name in result and field.name != OF_PIPELINES]
        inside = {option: result.pop(option) for option in names}
        if inside:
            result[name] = kind(**inside)  # type: ignore[arg-type]
    return result
