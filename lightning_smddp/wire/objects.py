"""Python's objects between the ranks of a group, by torch's object collectives, which pickle them.

Nothing large, and no tensor of a device: pickled it comes back on the sender's index. Those go by ``wire/stream.py``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's ``value``, in rank order, on every rank. Collective."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, group: dist.ProcessGroup, source: int = 0) -> Any:
    """The ``value`` of the rank ``source`` of ``group``, on every rank. Collective."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]
