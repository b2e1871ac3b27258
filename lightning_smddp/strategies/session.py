"""What the Trainer's and Fabric's strategies share: the life of the gradient communication."""

from __future__ import annotations

import atexit
import gc
import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_smddp._compat.torch import is_nccl, set_group_timeout
from lightning_smddp.communication.choose import Choice, choose
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.consistency import (
    check_compression,
    check_same_model,
    check_trainable,
    require_initialized,
    require_same,
)
from lightning_smddp.communication.groups import backend_timeout, close_all, ends_within
from lightning_smddp.communication.hook import GradientSynchronizer
from lightning_smddp.communication.report import CommunicationReport, Recorder
from lightning_smddp.strategies.options import GradientOptions
from lightning_smddp.wording import counted

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch.distributed's own
_LEAVE_S = 60.0  # for the groups to end
_LEAVE_AFTER_FAILURE_S = 5.0


class GradientCommunication:
    """Gradient communication of one strategy object: groups for its process group, a hook for each DDP module.

    :meth:`wrap` puts a module into DDP, and what averages its gradients into DDP's hook.
    """

    def __init__(self, options: GradientOptions) -> None:
        self.options = options
        self.communicator: Communicator | None = None
        self.synchronizers: list[GradientSynchronizer] = []
        self.choice: Choice | None = None
        self.recorder: Recorder | None = None  # not before setup: strategies travel to spawned ranks by pickle
        self.failed = False  # the last run

    def limit(self, timeout: timedelta | None) -> timedelta:
        """How long a collective may wait for a rank; ``timeout`` is the strategy's, which None leaves to torch."""
        return self.options.communication.limit or timeout or _DEFAULT_TIMEOUT

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

    def wrap(
        self,
        module: nn.Module,
        device: torch.device,
        ddp_kwargs: Mapping[str, Any],
        timeout: timedelta | None,
        looks: bool,
    ) -> DistributedDataParallel:
        """``module`` in DDP, with our averaging. Collective.

        Args:
            module: the user's.
            device: of this rank.
            ddp_kwargs: DDP's arguments, as the user gave them.
            timeout: the strategy's.
            looks: for NaN and inf in gradients.

        Raises:
            ValueError: on every rank, when the model or the options do not fit.
        """
        if ddp_kwargs.get("process_group") is not None or ddp_kwargs.get("device_mesh") is not None:
            raise ValueError(
                "`process_group` and `device_mesh` are not supported: the gradients of all ranks are averaged. "
                "Use Lightning's DDPStrategy for gradients of a part of the ranks."
            )
        synchronizer = self._synchronizer_of(module, device, timeout)
        synchronizer.watches = looks
        self.synchronizers.append(synchronizer)
        # Gradients are views of DDP's buckets then: what the hook has averaged in a bucket need not be copied to them.
        arguments = {"gradient_as_bucket_view": True, **ddp_kwargs}
        if self.options.bucket_cap_mb is not None and not ddp_kwargs.get("bucket_cap_mb_list"):
            arguments["bucket_cap_mb"] = self.options.bucket_cap_mb
        device_ids = None if device.type == "cpu" else [device.index]
        model = DistributedDataParallel(module, device_ids=device_ids, **arguments)

        # DDP calls it in the backward pass, when all gradients of a bucket are there, and sums nothing itself: what the
        # hook's future brings is the average.
        def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            return synchronizer.average(bucket)

        model.register_comm_hook(state=None, hook=_hook)
        return model

    def _synchronizer_of(
        self, module: nn.Module, device: torch.device, timeout: timedelta | None
    ) -> GradientSynchronizer:
        """Check the model, and choose what averages its gradients."""
        require_initialized(module)
        group = dist.group.WORLD
        assert group is not None
        # Modules that are wrapped one after the other share the groups, and what is measured.
        if self.communicator is None or self.recorder is None:
            self.recorder = Recorder(device)
            gradient_bytes = 0
            for parameter in module.parameters():
                if parameter.requires_grad:
                    gradient_bytes += parameter.numel() * parameter.dtype.itemsize
            self.communicator = Communicator(
                group,
                device,
                self.limit(timeout),
                self.recorder.on_wait,
                gradient_bytes,
            )
        # Each check is collective and raises on all ranks, so that none waits in the first all-reduce for one that
        # has left. Options come first, as they decide which messages follow.
        options = self.options
        told = f"algorithm={options.algorithm!r}, {options.compression}, bucket_cap_mb={options.bucket_cap_mb}"
        require_same("strategy's options", [told], "Give every rank the same ones.")
        check_same_model(module)
        check_trainable(module)
        compression = self.options.compression
        check_compression(module, compression)
        self.choice = Choice(options.algorithm)
        if options.algorithm == "auto":
            self.choice = choose(self.communicator, module, compression, options.bucket_cap_mb)
        return GradientSynchronizer(self.communicator, module, self.choice.algorithm, compression, self.recorder)

    def detach(self) -> None:
        """Close what averages for the module that was wrapped last."""
        if self.synchronizers:
            self.synchronizers.pop().close()

    def report(self) -> CommunicationReport | None:
        """What communication cost so far; None before the first module. Collective."""
        if not self.synchronizers:
            return None
        return self.synchronizers[-1].report()

    def state_dict(self) -> Mapping[str, Any]:
        """What compression remembers on this rank; empty without compression."""
        if not self.synchronizers:
            return {}
        return self.synchronizers[-1].state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's :meth:`state_dict`."""
        if self.synchronizers:
            self.synchronizers[-1].load_state_dict(state)

    def close(self) -> None:
        """Free everything; the next :meth:`wrap` starts anew."""
        for synchronizer in self.synchronizers:  # first what works over the communicator's groups and memory
            synchronizer.close()
        self.synchronizers = []
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None

    def summary(self, batch: int | None = None, accumulate: int | None = None) -> list[tuple[str, str]]:
        """What runs here, in rows of name and value."""
        assert self.communicator is not None
        assert self.choice is not None
        topology = self.communicator.topology
        world = topology.world_size
        sizes = [len(ranks) for ranks in topology.nodes]
        least, most = min(sizes), max(sizes)
        ranks_per_node = f"{least} to {most}" if most > least else str(least)
        rows = [
            ("nodes", f"{topology.num_nodes} ({', '.join(topology.hosts)})"),
            ("ranks per node", ranks_per_node),
            ("cluster size", f"{counted(world, 'rank')} on {self.communicator.device.type}"),
            ("replicas", str(world)),
        ]
        if batch is not None:
            rows.append(("per-replica batch", str(batch)))
        if accumulate is not None:
            rows.append(("accumulation", str(accumulate)))
        if batch is not None:
            global_batch = world * batch * (accumulate or 1)
            rows.append(("global batch", f"{global_batch} for each optimizer step"))
        bucket_size = "DDP's default"
        if self.options.bucket_cap_mb is not None:
            bucket_size = f"{self.options.bucket_cap_mb:g} MiB"
        rows += [
            ("backend", str(dist.get_backend(self.communicator.group))),
            ("algorithm", str(self.choice)),
            ("bucket size", bucket_size),
            ("wire dtype", self._wire()),
        ]
        rows += [("note", note) for note in self.communicator.notes]
        return rows

    def _wire(self) -> str:
        compression = self.options.compression
        assert self.communicator is not None
        if compression is None:
            return "as the gradients (exact)"
        if not self.communicator.compresses(compression):
            return f"as the gradients (exact): {compression.method} applies between nodes, and there is one node"
        among_all = compression.scope == "all" or compression.method == "powersgd"
        where = "among all ranks" if among_all else "between nodes"
        feedback = "with" if compression.error_feedback else "without"
        return f"{compression.method} {where}, {feedback} error feedback"


def _leave(reference: weakref.ref[GradientCommunication]) -> None:
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


def check_devices(num_processes: int, creates_processes_externally: bool) -> None:
    """Raise ``ValueError`` if ``devices`` contradicts what the launcher started on this node."""
    started = os.environ.get("LOCAL_WORLD_SIZE")
    if creates_processes_externally and started is not None and int(started) != num_processes:
        raise ValueError(
            f"The launcher started {counted(int(started), 'process')} on this node (LOCAL_WORLD_SIZE={started}), "
            f"but the strategy was asked for devices={num_processes}. Set devices={started}, or start "
            f"{counted(num_processes, 'process')} a node (for torchrun: --nproc-per-node={num_processes})."
        )
