"""The collectives of sharded parameters: what torch's FSDP2 (``fully_shard``) asks of communication, done by us."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.node_mesh import NodeMesh, OnWait
from lightning_smddp.communication.shared_segments import SharedSegments
from lightning_smddp.communication.unit_collectives import ShardGroup, SharedAllGather, SharedReduceScatter


class ShardedCollectives:
    """All-gather and reduce-scatter of the modules that ``fully_shard`` shards. Creation is collective.

    ::

        mesh = init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))  # or ("shard",)
        collectives = ShardedCollectives(mesh, timeout=timedelta(minutes=30))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        collectives.attach(model)  # every FSDPModule in it
        ...                        # training, evaluation, state dicts: as ever
        collectives.close()        # at the end, also after an error

    On CPUs the ranks that share each parameter gather and reduce through shared memory; where they are on several
    nodes, through shared memory in each node and by the backend between ranks of equal local rank. Everything else is
    FSDP2's own: GPUs, the mean over copies of the parameters, ranks that are not spread evenly over nodes, and CPUs
    where shared memory does not work (see ``notes``).

    Args:
        mesh: that of ``fully_shard``; its last dimension has the ranks that share each parameter.
        timeout: how long a collective waits for a rank.
        on_wait: called when this rank waited inside its node.

    Attributes:
        notes: why something that is wanted is not used, a sentence each.
    """

    def __init__(self, mesh: DeviceMesh, timeout: timedelta, on_wait: OnWait | None = None) -> None:
        self.notes: list[str] = []
        self._names: list[str] = []  # of modules
        self._communicator: Communicator | None = None
        self._segments: SharedSegments | None = None
        self._group: ShardGroup | None = None
        if mesh.device_type != "cpu":
            return
        communicator = Communicator(mesh.get_group(mesh.ndim - 1), torch.device("cpu"), timeout, on_wait)
        self._communicator = communicator
        self.notes += communicator.notes
        topology = communicator.topology
        alone = len(topology.local_ranks) == 1
        counts = [len(ranks) for ranks in topology.nodes]
        if len(set(counts)) > 1:
            listed = ", ".join(map(str, counts))
            self.notes.append(f"FSDP2's own collectives: its nodes have {listed} ranks, not equally many")
            return
        if topology.world_size == 1 or (not alone and communicator.shared_memory_refusal is not None):
            return
        partners = None
        if topology.num_nodes > 1:
            partners = communicator.partners("sharded")
        self._group = ShardGroup(dist.get_process_group_ranks(communicator.group), topology, partners)
        node_mesh = NodeMesh(topology, {}, timeout) if alone else communicator.node_mesh
        self._segments = SharedSegments(node_mesh, self._names, on_wait)

    def attach(self, module: nn.Module) -> None:
        """Let every ``FSDPModule`` in ``module`` communicate by this object, from its next forward on.

        Modules and their order are the same on all ranks. May be called again, for other modules.
        """
        if self._segments is None or self._group is None:
            return
        for name, unit in module.named_modules():
            if isinstance(unit, FSDPModule):
                number = len(self._names)  # the same on all ranks, as the order of modules is
                self._names.append(name or type(module).__name__)
                # FSDP2's base classes of these have no public names.
                gather: Any = SharedAllGather(self._segments, number, self._group)
                unit.set_custom_all_gather(gather)
                scatter: Any = SharedReduceScatter(self._segments, number, self._group)
                unit.set_custom_reduce_scatter(scatter)

    def describe(self) -> str:
        """How parameters and gradients travel, for logs."""
        if self._group is None:
            return "FSDP2's own collectives"
        if self._group.partners is None:
            return "shared memory"
        return "shared memory in each node, the backend between ranks of equal local rank"

    def close(self) -> None:
        """Free memory, sockets and groups. The modules cannot be run after it. Not collective."""
        if self._segments is not None:
            self._segments.close()
        if self._communicator is not None:
            self._communicator.close()
