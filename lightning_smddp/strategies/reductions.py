"""Means of logged values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor


def mean_by_sum(reduce: Callable[[Any, Any, Any], Tensor], tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """``reduce``, but a mean is asked for as a sum and divided here.

    Lightning asks every backend but gloo for ``ReduceOp.AVG``, which not every one has (MPI's has not):
    Lightning issue #20409. As there, integer tensors stay integer.
    """
    name = reduce_op.lower() if isinstance(reduce_op, str) else None
    average = name in ("mean", "avg") or reduce_op == dist.ReduceOp.AVG
    if not average or not isinstance(tensor, Tensor) or not dist.is_initialized():
        return reduce(tensor, group, reduce_op)
    total = reduce(tensor, group, "sum")
    size = dist.get_world_size(group)
    if total.is_floating_point() or total.is_complex():
        return total.div_(size)
    return total.copy_(total / size)
