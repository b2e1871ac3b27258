"""How ``smddp`` averages gradients and shards optimizers: the same for the Trainer and for Fabric.

The hook that :meth:`DDPScheme.wrap` gives to DDP is ``communication/hook.py``; :meth:`DDPScheme.shard_optimizers` is
where ``shard="optimizer"`` begins, in ``sharding/sharded_optimizers.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_smddp.communication.choose import Choice, choose
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.consistency import (
    check_same_model,
    require_initialized,
    require_same,
)
from lightning_smddp.communication.diloco import DiLoCo, OuterOptimizer
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.hook import GradientSynchronizer
from lightning_smddp.communication.nonfinite import NonFinite
from lightning_smddp.communication.report import CommunicationReport, Recorder
from lightning_smddp.sharding.optimizer_shards import OptimizerShards, all_parameters
from lightning_smddp.sharding.optimizer_states import whole_state_dict
from lightning_smddp.sharding.sharded_optimizers import ShardedOptimizers, require_shareable
from lightning_smddp.strategies.options import StrategyOptions
from lightning_smddp.wording import counted


class DDPScheme:
    """Modules in DDP, until :meth:`close`, and the optimizers whose work ranks share.

    Args:
        options: how gradients are averaged and optimizers sharded.
        sync: how nodes synchronise parameters; gradients are then averaged inside of each node. Of one module.

    Attributes:
        synchronizers: what averages, for each module.
        sharded: with ``shard``, the optimizers.
        outer: with ``sync``, what nodes have in common, from the first module on; also of an ended run.

    Raises:
        ValueError: an option does not fit ``sync``.
    """

    def __init__(self, options: StrategyOptions, sync: DiLoCo | None = None) -> None:
        if sync is not None:
            _require_fits_sync(options)
        self.options = options
        self.sync = sync
        self.outer: OuterOptimizer | None = None
        self.communicator: Communicator | None = None  # modules share its groups
        self.nodes: Communicator | None = None  # with `sync`: of all ranks, while `communicator` is of this node's
        self.synchronizers: list[GradientSynchronizer] = []
        self.sharded: list[ShardedOptimizers] = []
        self._choice: Choice | None = None
        self._recorder: Recorder | None = None
        self._frozen: list[tuple[str, nn.Parameter]] = []  # what required no gradient, of all modules

    # ---- modules ----

    def wrap(
        self,
        module: nn.Module,
        device: torch.device,
        limit: timedelta,
        given: Mapping[str, Any],
        watches: bool,
    ) -> DistributedDataParallel:
        """``module`` in DDP, with our averaging. Collective.

        Args:
            module: the user's.
            device: of this rank.
            limit: how long a collective waits for a rank.
            given: DDP's arguments, as the user gave them.
            watches: whether gradients are looked at for NaN and inf.

        Raises:
            ValueError: on every rank, when the model or the options do not fit.
        """
        arguments = dict(given)
        if self.options.bucket_cap_mb is not None and not given.get("bucket_cap_mb_list"):
            arguments["bucket_cap_mb"] = self.options.bucket_cap_mb
        # DDP averages for good what requires gradients now; what is unfrozen later it leaves alone, without a word.
        self._frozen += [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        if given.get("process_group") is not None or given.get("device_mesh") is not None:
            raise ValueError(
                "`process_group` and `device_mesh` are not supported: the gradients of all ranks are averaged. "
                "Use Lightning's DDPStrategy for gradients of a part of the ranks."
            )
        synchronizer = self._make_synchronizer(module, device, limit)
        synchronizer.watches = watches
        if self.sync is not None and self.nodes is not None:
            arguments["process_group"] = synchronizer.communicator.group
            if self.outer is None:
                self.outer = OuterOptimizer(self.sync, self.nodes, module)
        # Gradients are views of DDP's buckets then: what is averaged in a bucket need not be copied to them.
        arguments.setdefault("gradient_as_bucket_view", True)

        # DDP calls it in the backward pass, when all gradients of a bucket are there, and sums nothing itself: what
        # the hook's future brings is the average.
        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            return synchronizer.average(bucket)

        device_ids = None if device.type == "cpu" else [device.index]
        model = DistributedDataParallel(module, device_ids=device_ids, **arguments)
        model.register_comm_hook(state=None, hook=hook)
        return model

    def _make_synchronizer(self, module: nn.Module, device: torch.device, limit: timedelta) -> GradientSynchronizer:
        """Check the model, and choose what averages its gradients."""
        require_initialized(module)
        if self.communicator is None or self._recorder is None:
            self.sharded, self.outer = [], None  # until now those of an ended run, whose state can be saved
            self._recorder = Recorder(device)
            size = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
            group = world()
            if self.sync is not None:
                self.nodes = Communicator(group, device, limit, gradient_bytes=size)
                group = self.nodes.node_group("gradients")
            self.communicator = Communicator(group, device, limit, self._recorder.on_wait, size)
        # Each check is collective and raises on all ranks, so that none waits in the first all-reduce for one that
        # has left. Options come first, as they decide which messages follow.
        ours = self.options
        told = f"algorithm={ours.algorithm!r}, {ours.compression}, bucket_cap_mb={ours.bucket_cap_mb}, {self.sync}"
        require_same("strategy's options", [told], "Give every rank the same ones.")
        check_same_model(module)
        self._choice = Choice(ours.algorithm)
        if ours.algorithm == "auto":
            self._choice = choose(self.communicator, module, ours.compression, ours.bucket_cap_mb)
        synchronizer = GradientSynchronizer(
            self.communicator, module, self._choice.algorithm, ours.compression, self._recorder
        )
        self.synchronizers.append(synchronizer)
        return synchronizer

    @property
    def has_unfrozen(self) -> bool:
        """Whether what was frozen when its module was wrapped requires gradients by now."""
        return any(parameter.requires_grad for _, parameter in self._frozen)

    def require_averaged(self, cure: str) -> None:
        """Raise ``RuntimeError``, with ``cure``, if a backward pass has made gradients that are not averaged."""
        trained = [name for name, parameter in self._frozen if parameter.requires_grad and parameter.grad is not None]
        if trained:
            raise RuntimeError(
                f"{counted(len(trained), 'parameter')} with new gradients were frozen when the module was wrapped, so "
                f"each rank would train its own copy of {trained[0]}. {cure}"
            )

    def unwrap(self) -> None:
        """The one module is about to be wrapped anew, in other buckets, with what was unfrozen: its DDP object is gone.

        What compression has not sent yet is left out.
        """
        self._frozen.clear()
        self.synchronizers.pop().close()
        gc.collect()  # DDP objects are cycles, and the old one's buckets are as large as the gradients

    # ---- steps ----

    def nonfinite(self, optimizer: Optimizer, changed: bool) -> NonFinite | None:
        """What is wrong with the gradients that ``optimizer`` is to step; None if no rank has found anything.

        ``changed``: whether code of the user's may have written them since they were averaged.
        """
        for synchronizer in self.synchronizers:
            found = synchronizer.nonfinite(all_parameters(optimizer), changed)
            if found is not None:
                return found
        return None

    def shard_optimizers(self, parameters: Iterable[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Each rank steps a share of what ``optimizers`` have of ``parameters`` from here on. Collective.

        Raises:
            ValueError: on every rank: an optimizer cannot be sharded.
        """
        assert self.communicator is not None
        for optimizer in optimizers:
            require_shareable(optimizer)
        shards = [OptimizerShards(optimizer) for optimizer in optimizers]
        self.sharded.append(ShardedOptimizers(parameters, shards, self.communicator))

    def sharded_of(self, optimizer: Optimizer) -> ShardedOptimizers | None:
        """What ``optimizer`` is sharded by; None if it is not."""
        for sharded in self.sharded:
            if any(shards.optimizer is optimizer for shards in sharded.shards):
                return sharded
        return None

    @property
    def shards(self) -> list[OptimizerShards]:
        """This rank's share of each optimizer that is sharded."""
        return [shards for sharded in self.sharded for shards in sharded.shards]

    # ---- states ----

    def optimizer_state(self, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
        """The state of a whole optimizer that is sharded, on the first rank. Collective."""
        (shards,) = [shards for shards in self.shards if shards.optimizer is optimizer]
        return whole_state_dict(shards, world(), device)

    # ---- what users see, and the end ----

    def report(self) -> CommunicationReport | None:
        """What communication cost so far; None before the first module. Collective."""
        communicator = self.nodes or self.communicator
        if communicator is None or self._recorder is None:
            return None
        return CommunicationReport.collect(self._recorder, communicator)

    def describe(self) -> list[tuple[str, str]]:
        """What runs here, in rows of name and value."""
        assert self.communicator is not None
        topology, compression = (self.nodes or self.communicator).topology, self.options.compression
        cap = self.options.bucket_cap_mb
        wire = "none (exact)" if compression is None else str(compression.method)
        if compression is not None and not self.communicator.compresses(compression):
            wire = f"none: {wire} applies between nodes, and there is one node"
        rows = [
            ("ranks", f"{topology.world_size} on {self.communicator.device.type}"),
            ("nodes", f"{topology.num_nodes} ({', '.join(topology.hosts)})"),
            ("backend", str(dist.get_backend(self.communicator.group))),
            ("algorithm", str(self._choice)),
            ("bucket size", "DDP's default" if cap is None else f"{cap:g} MiB"),
            ("compression", wire),
        ]
        if self.sync is not None:
            rows.append(("sync", f"nodes every {counted(self.sync.every, 'step')}: {self.sync}"))
        rows += [("note", note) for note in self.communicator.notes]
        return rows + [row for sharded in self.sharded for row in sharded.describe()]

    def close(self) -> None:
        """Free shared memory, threads and sockets; the next :meth:`wrap` starts anew. Not collective."""
        for sharded in self.sharded:
            sharded.close()
        for synchronizer in self.synchronizers:  # before the communicator, over whose groups and memory it works
            synchronizer.close()
        if self.outer is not None:
            self.outer.close()
        for communicator in (self.communicator, self.nodes):  # the second one has the group of the first
            if communicator is not None:
                communicator.close()
        self.synchronizers, self._frozen = [], []
        self.communicator = self.nodes = None


def _require_fits_sync(options: StrategyOptions) -> None:
    """Raise ``ValueError`` for what takes all ranks in each step."""
    communication = options.communication
    given = {"shard": options.shard, "compression": options.compression, "loss_weight": communication.loss_weight}
    for name, value in {**given, "uneven": communication.uneven}.items():
        if value not in (None, "stop"):
            raise ValueError(
                f"{name}={value!r} cannot be used with sync=DiLoCo(...), as nodes exchange nothing in a step. Leave it "
                "out; what nodes do exchange is compressed by DiLoCo(compression=...)."
            )
