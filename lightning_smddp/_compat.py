"""The one place for private APIs of torch and Lightning, each with its reason and the condition for its removal."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 renamed `all_gather_into_tensor` and deprecated the old name.
# Remove when the oldest supported torch has `all_gather_single`.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Gather equal ``tensor``s of all ranks, in rank order, into the flat ``output``."""
    _all_gather_single(output, tensor, group=group)


def reduce_scatter_single(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``tensor`` over the ranks; rank i receives the i-th of equal parts in ``output``."""
    _reduce_scatter_single(output, tensor, group=group)


def share_storage(tensor: Tensor) -> int:
    """Move ``tensor``'s whole storage into shared memory, in place, and return the segment's file descriptor.

    Every other view of the storage moves along, which is what makes DDP's own buckets shareable without a copy.
    The file is unlinked before this returns and its space is allocated (no later SIGBUS); the descriptor belongs to
    the storage. Raises ``RuntimeError`` when the shared-memory mount is full.

    Private because the public ``share_memory_()`` picks its strategy from a process-wide setting and hands out no
    descriptor. Remove when torch offers one.
    """
    fd, _size = tensor.untyped_storage()._share_fd_cpu_()
    return cast(int, fd)


def set_group_timeout(timeout: timedelta) -> None:
    """Give the default group another timeout. Remove when ``torch.distributed`` has a public setter."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout)


def default_store() -> dist.Store:
    """The default group's key-value store. Remove when ``torch.distributed`` has a public getter."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def register_ddp_comm_hook(model: DistributedDataParallel, state: object, hook: Any, wrapper: Any) -> None:
    """Register a user's hook as Lightning does on CUDA. Private in Lightning; remove when it does so on CPU too."""
    if wrapper is not None and hook is not None:
        hook = wrapper(hook)
    if hook is not None:
        model.register_comm_hook(state=state, hook=hook)
