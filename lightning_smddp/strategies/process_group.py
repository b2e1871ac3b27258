"""The default process group: its start, by ``communication/rendezvous.py``, and its end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_smddp._compat.torch import is_nccl, set_group_timeout
from lightning_smddp.communication.groups import backend_timeout, close_all, ends_within, forget_aborted_groups
from lightning_smddp.communication.rendezvous import NCCL_AND_GLOO, RankInfo, join, start_limit, versions
from lightning_smddp.strategies.environments import before_start
from lightning_smddp.strategies.options import StrategyOptions

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_LEAVE_S = 60.0  # for the groups to end
_LEAVE_AFTER_FAILURE_S = 5.0


class DefaultGroup:
    """The runs of one strategy object, and how the process group ends.

    Args:
        options: of the strategy.
        close: frees what works over the group, before it ends.
    """

    def __init__(self, options: StrategyOptions, close: Callable[[], None] | None = None) -> None:
        self.options = options
        self.close = close or _nothing
        self.failed = False  # the last run

    def process_group_started(self) -> None:
        """Give the default group the collective timeout, now that everyone has started, and see to its end."""
        if not dist.is_initialized():
            return
        # The default group was made with DDP's `timeout`. A limit for collectives holds from here on.
        limit = self.options.communication.limit
        if limit is not None:
            set_group_timeout(backend_timeout(limit, is_nccl()))
        # A weak reference: the interpreter's list of functions must not keep this object, and memory of it, alive.
        atexit.register(_leave, weakref.ref(self))


def _nothing() -> None:
    pass


def start_process_group(strategy: Any) -> None:
    """Start the default process group for ``strategy``, of the Trainer or of Fabric, unless there is one.

    What Lightning's ``_init_dist_connection`` does, except for the rendezvous. It has to be called after
    ``set_world_ranks`` and before the group is used; Lightning then finds the group and leaves it alone. Collective.

    Raises:
        StartError: see ``join``.
        ValueError: what the launcher has set cannot work.
    """
    environment, backend = strategy.cluster_environment, strategy._get_process_group_backend()
    forget_aborted_groups()  # those of a run in this process that has failed are still registered
    if dist.is_initialized() or backend == "mpi":  # MPI brings its own rendezvous
        return
    before_start(strategy, strategy._communication.verbose)
    # Lightning's package, which is imported; classes of the user's may stand before it.
    package = next(name for cls in type(strategy).__mro__ if (name := cls.__module__.partition(".")[0]) in _PACKAGES)
    lightning = str(sys.modules[package].__version__)
    card = RankInfo(environment.global_rank(), environment.world_size(), versions(lightning))
    address = (environment.main_address, int(environment.main_port))
    # As Lightning does, for what reads them beside torch.
    os.environ["MASTER_ADDR"] = address[0]
    os.environ["MASTER_PORT"] = str(address[1])
    # Objects, and checkpoints in the background, go from host to host by gloo; tensors of GPUs by NCCL.
    if backend == "nccl" and dist.is_gloo_available():
        backend = NCCL_AND_GLOO
    # With an accelerator NCCL makes its communicator now, and not at its first use.
    device = None if strategy.root_device.type == "cpu" else strategy.root_device
    init_timeout = start_limit(strategy._reliability.start_limit, strategy._timeout)
    join(card, address, backend, device, strategy._limit, init_timeout)
    if card.world_size > 1:
        rank_zero_info(f"{card.world_size} processes are connected, by {backend}.")


def _leave(reference: weakref.ref[DefaultGroup]) -> None:
    """End the process group before the interpreter ends.

    Else a thread of gloo's that lets go of its last tensor meanwhile ends the process with SIGABRT, now and then.
    Lightning does the same for NCCL, which waits for all that was launched: that may never end after a failure.
    """
    session = reference()
    failed = session is not None and session.failed
    patience_s = _LEAVE_AFTER_FAILURE_S if failed else _LEAVE_S
    with ends_within(patience_s):
        if session is not None:
            session.close()
        close_all(failed)
        gc.collect()
