"""Between Lightning's strategies and ``communication/rendezvous.py``: how they start the default process group."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_smddp.communication.groups import forget_aborted_groups
from lightning_smddp.communication.rank_info import versions
from lightning_smddp.communication.rendezvous import RendezvousConfig, join
from lightning_smddp.strategies.environments import before_start


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
    forget_aborted_groups()
    if dist.is_initialized() or backend == "mpi":  # MPI brings its own rendezvous
        return
    before_start(strategy, strategy._session.options.communication.verbose)
    rank, world_size = environment.global_rank(), environment.world_size()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    meeting = RendezvousConfig(
        rank=rank,
        world_size=world_size,
        spans_nodes=strategy.num_nodes > 1,
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        versions=versions(_lightning_version(strategy)),
    )
    device: torch.device | None = None if strategy.root_device.type == "cpu" else strategy.root_device
    served = join(meeting, backend, device, timeout, init_timeout)
    line = "-" * 100
    where = ""
    if served:
        where = f"The job's store listens on {served}\n"
    rank_zero_info(
        f"{line}\ndistributed_backend={backend}\n{where}"
        f"All distributed processes registered. Starting with {world_size} processes\n{line}\n"
    )


def _lightning_version(strategy: Any) -> str:
    """Of the package that ``strategy`` extends, which is imported."""
    base = next(cls for cls in type(strategy).__mro__ if not cls.__module__.startswith("lightning_smddp"))
    return str(getattr(sys.modules[base.__module__.partition(".")[0]], "__version__", "unknown"))
