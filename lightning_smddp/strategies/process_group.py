"""The default process group: how it is started, by ``communication/rendezvous.py``, and means over its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_smddp.communication.groups import forget_aborted_groups
from lightning_smddp.communication.rendezvous import NCCL_AND_GLOO, RankInfo, join, start_limit, versions
from lightning_smddp.strategies.environments import before_start

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def start_process_group(
    strategy: Any, backend: str, timeout: timedelta | None, init_timeout: timedelta | None = None
) -> None:
    """Start the default process group for ``strategy`` (a ``DDPStrategy`` of either package), unless there is one.

    What Lightning's ``_init_dist_connection`` does, except for the rendezvous. It has to be called after
    ``set_world_ranks`` and before the group is used; Lightning then finds the group and leaves it alone. Collective.

    Raises:
        StartError: see ``join``.
        ValueError: what the launcher has set cannot work.
    """
    environment = strategy.cluster_environment
    forget_aborted_groups()  # those of a run in this process that has failed are still registered
    if dist.is_initialized() or backend == "mpi":  # MPI brings its own rendezvous
        return
    before_start(strategy, strategy._session.options.communication.verbose)
    card = RankInfo(environment.global_rank(), environment.world_size(), versions(lightning_version(strategy)))
    address = (environment.main_address, int(environment.main_port))
    # As Lightning does, for what reads them beside torch.
    os.environ["MASTER_ADDR"] = address[0]
    os.environ["MASTER_PORT"] = str(address[1])
    # Objects, and checkpoints in the background, go from host to host by gloo; tensors of GPUs by NCCL.
    if backend == "nccl" and dist.is_gloo_available():
        backend = NCCL_AND_GLOO
    # With an accelerator NCCL makes its communicator now, and not at its first use.
    device: torch.device | None = strategy.root_device
    if strategy.root_device.type == "cpu":
        device = None
    limit = strategy._session.limit(timeout)
    join(card, address, backend, device, limit, start_limit(init_timeout, timeout))
    line = "-" * 100
    rank_zero_info(
        f"{line}\ndistributed_backend={backend}\n"
        f"All distributed processes registered. Starting with {card.world_size} processes\n{line}\n"
    )


def lightning_version(strategy: Any) -> str:
    """Of the package that ``strategy`` extends, which is imported; classes of the user's may stand before it."""
    for cls in type(strategy).__mro__:
        package, _, _ = cls.__module__.partition(".")
        if package in _PACKAGES:
            return str(sys.modules[package].__version__)
    return "unknown"


def mean_by_sum(reduce: Callable[[Any, Any, Any], Tensor], tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """``reduce``, but a mean is asked for as a sum and divided here.

    Lightning asks every backend but gloo for ``ReduceOp.AVG``, which not every one has (MPI's has not):
    Lightning issue #20409. As there, integer tensors stay integer.
    """
    averages = reduce_op == dist.ReduceOp.AVG
    if isinstance(reduce_op, str):
        averages = reduce_op.lower() in ("mean", "avg")
    if not averages or not isinstance(tensor, Tensor) or not dist.is_initialized():
        return reduce(tensor, group, reduce_op)
    total = reduce(tensor, group, "sum")
    size = dist.get_world_size(group)
    if total.is_floating_point() or total.is_complex():
        return total.div_(size)
    return total.copy_(total / size)
