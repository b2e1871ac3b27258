"""The collectives of sharded parameters: what torch's FSDP2 (``fully_shard``) asks of communication, done by us."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_smddp._compat.fsdp import unit_parameters
from lightning_smddp.communication.buckets import Layout
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.compression import Compression, ErrorFeedback
from lightning_smddp.communication.inter_node import ScatterExchange
from lightning_smddp.communication.intra_node import IntraNodeGroup
from lightning_smddp.communication.node_mesh import NodeMesh, OnWait
from lightning_smddp.communication.nonfinite import agreed
from lightning_smddp.communication.shared_segments import SharedSegments
from lightning_smddp.communication.unit_collectives import (
    DeviceReduceScatter,
    ShardGroup,
    SharedAllGather,
    SharedReduceScatter,
)
from lightning_smddp.communication.unit_layouts import UnitLayout
from lightning_smddp.communication.unit_memory import Exchanges, UnitMemory


class ShardedCollectives:
    """All-gather, reduce-scatter and all-reduce of the modules that ``fully_shard`` shards. Creation is collective.

    ::

        mesh = init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))  # or ("shard",)
        collectives = ShardedCollectives(mesh, timeout=timedelta(minutes=30))
        for block in model.blocks:
            fully_shard(block, mesh=collectives.fsdp_mesh)
        fully_shard(model, mesh=collectives.fsdp_mesh)
        collectives.attach(model)  # every FSDPModule in it
        ...                        # training, evaluation, state dicts: as ever
        collectives.close()        # at the end, also after an error

    What runs where:

    ============== ==================================== ============================================
    ranks          parameters and gradients, ``shard``  gradients, ``replicate``
    ============== ==================================== ============================================
    CPU, one node  shared memory                        shared memory
    CPU, nodes     shared memory in each node, the      as ``hierarchical`` of
                   backend between ranks of equal       ``communication/algorithms.py``
                   local rank
    GPU            FSDP2's own, on NCCL                 FSDP2's own, on NCCL
    ============== ==================================== ============================================

    With compression, gradients are compressed between nodes in both columns, also on GPUs; parameters never are (a
    ``MixedPrecisionPolicy`` gathers them in 16 bits). FSDP2's own collectives serve where its ranks are not spread
    evenly over nodes, or shared memory does not work: see ``notes``.

    Args:
        mesh: with one dimension, whose ranks share each parameter, or two, ``(replicate, shard)``: groups of ranks
            that share each parameter, and ranks that hold the same share.
        timeout: how long a collective waits for a rank.
        compression: of gradients between nodes: by ``"bf16"``, ``"fp16"`` or ``"int8"``.
        on_wait: called when this rank waited inside its node.

    Attributes:
        fsdp_mesh: the mesh for ``fully_shard``: only the dimension ``shard`` of ``mesh`` where the gradients' mean over
            the other dimension is taken here, as FSDP2 would take it again. ``set_requires_all_reduce`` has no effect
            then: each reduction covers all ranks.
        notes: why something that is wanted is not used, a sentence each.

    Raises:
        ValueError: the mesh has another number of dimensions or no names, or the compression does not fit.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        timeout: timedelta,
        compression: Compression | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        _require_usable(mesh, compression)
        self.fsdp_mesh = mesh
        self.notes: list[str] = []
        self._communicators: list[Communicator] = []
        self._layouts: list[UnitLayout] = []
        self._remembers = False
        self._replicas: _MeanOverReplicas | None = None
        self._shards: _Shards | None = None
        # On GPUs FSDP2 keeps its own collectives, unless gradients are to be compressed.
        device = torch.device(mesh.device_type)
        if device.type != "cpu" and compression is None:
            return
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        replicas: Communicator | None = None
        if mesh.ndim == 2:
            _, shard_dimension = cast(Any, mesh.mesh_dim_names)
            self.fsdp_mesh = mesh[shard_dimension]
            replicas = Communicator(mesh.get_group(0), device, timeout, on_wait)
            self._communicators.append(replicas)
        shards = Communicator(self.fsdp_mesh.get_group(), device, timeout, on_wait)
        self._communicators.append(shards)
        if replicas is not None:
            self._replicas = _MeanOverReplicas(replicas, compression)
        self._shards = _Shards(shards, compression, on_wait)
        for communicator in self._communicators:
            self.notes += communicator.notes
        self.notes += self._shards.notes
        if compression is None:
            return
        compresses = any(each.compresses(compression) for each in self._communicators)
        if compression.error_feedback:
            self._remembers = compresses
            for communicator in self._communicators:  # one copy's ranks may be on one node, another one's on several
                self._remembers = agreed(self._remembers, communicator.group, communicator.device)
        if not compresses:
            self.notes.append(f"compression={compression.method!r} applies between nodes, and there is one node")

    def attach(self, module: nn.Module) -> None:
        """Let every ``FSDPModule`` in ``module`` communicate by this object, from its next forward on.

        Modules and their order are the same on all ranks. May be called again, for other modules.
        """
        if self._shards is None:
            return
        shard_group = self.fsdp_mesh.get_group()
        for name, unit in module.named_modules():
            if not isinstance(unit, FSDPModule):
                continue
            number = len(self._layouts)  # the same on all ranks, as the order of modules is
            layout = UnitLayout(number, shard_group.size(), partial(unit_parameters, unit))
            self._layouts.append(layout)
            self._shards.attach(name or type(module).__name__, unit, layout)
            if self._replicas is not None:
                hook = self._replicas.hook(layout, shard_group.rank())
                unit.set_all_reduce_hook(hook)

    @property
    def memory(self) -> UnitMemory | None:
        """What compression remembers; None, on all ranks, if no rank ever remembers anything."""
        if self._shards is None or not self._remembers:
            return None
        shards = self._communicators[-1]
        replica_group: dist.ProcessGroup | None = None
        feedback: ErrorFeedback | None = None
        members = 1
        if self._replicas is not None:
            replica_group = self._communicators[0].group
            feedback = self._replicas.feedback
            members = self._replicas.members
        exchanges = Exchanges(
            shard_group=shards.group,
            replica_group=replica_group,
            owners=self._shards.owners,
            partners=self._shards.exchange,
            replicas=feedback,
            members=members,
        )
        return UnitMemory(self._layouts, exchanges, shards.device)

    @property
    def shared_bytes(self) -> int:
        """Memory that this node's ranks have in common for gathering and reducing, so far."""
        if self._shards is None:
            return 0
        return self._shards.shared_bytes

    def describe(self) -> str:
        """How parameters and gradients travel, for logs."""
        if self._shards is None:
            return "FSDP2's own collectives"
        parts = [self._shards.describe()]
        if self._replicas is not None:
            parts.append(f"replicas by {self._replicas.name}")
        return "; ".join(parts)

    def close(self) -> None:
        """Free memory, sockets and groups. The modules cannot be run after it. Not collective."""
        if self._replicas is not None:
            self._replicas.close()
        if self._shards is not None:
            self._shards.close()
        for communicator in self._communicators:
            communicator.close()


class _Shards:
    """What the ranks that share each parameter do."""

    def __init__(self, communicator: Communicator, compression: Compression | None, on_wait: OnWait | None) -> None:
        self.notes: list[str] = []
        self._names: list[str] = []
        self._communicator = communicator
        self._segments: SharedSegments | None = None
        self.exchange: ScatterExchange | None = None
        self._inside: IntraNodeGroup | None = None
        self._group: ShardGroup | None = None
        topology = communicator.topology
        spans_nodes = topology.num_nodes > 1
        different_counts = {len(ranks) for ranks in topology.nodes}
        if spans_nodes and len(different_counts) > 1:
            _refuse_uneven(topology.nodes, compression)
            self.notes.append(
                f"FSDP2's own collectives: its nodes have {_counts(topology.nodes)} ranks, not equally many"
            )
            return
        alone = len(topology.local_ranks) == 1
        on_cpu = communicator.device.type == "cpu"
        # Where nothing is to be done here, `_group` stays None and FSDP2 keeps its own collectives: on CPUs of a node
        # without shared memory (a note says so), for a single rank, and for NCCL on one node.
        if on_cpu and not alone and communicator.shared_memory_refusal is not None:
            return
        if not spans_nodes and (alone or not on_cpu):
            return
        partners = None
        if spans_nodes:
            partners = communicator.partners("sharded")
            assert partners is not None
            self.exchange = _exchange(partners, compression)
        global_ranks = dist.get_process_group_ranks(communicator.group)
        self._group = ShardGroup(global_ranks, topology, partners)
        if not on_cpu:
            neighbours = communicator.neighbours("sharded, inside")
            if neighbours is not None:
                self._inside = IntraNodeGroup(neighbours, topology.num_shards)
            return
        mesh = NodeMesh(topology, {}, communicator.timeout)
        if not alone:
            mesh = communicator.node_mesh
        self._segments = SharedSegments(mesh, self._names, on_wait)

    def attach(self, name: str, unit: FSDPModule, layout: UnitLayout) -> None:
        """Give the unit its collectives."""
        self._names.append(name)
        # Shared memory takes the place of both collectives. Compression on GPUs is only of the reduce-scatter: what
        # parameters are gathered by stays FSDP2's.
        gather: SharedAllGather | None = None
        scatter: SharedReduceScatter | DeviceReduceScatter | None = None
        if self._group is not None and self._segments is not None:
            gather = SharedAllGather(self._segments, layout.number, self._group)
            scatter = SharedReduceScatter(self._segments, layout, self._group, self.exchange)
        elif self._group is not None and self.exchange is not None:
            scatter = DeviceReduceScatter(self._inside, layout, self._group, self.exchange)
        # FSDP2's base classes of these have no public names.
        if gather is not None:
            unit.set_custom_all_gather(cast(Any, gather))
        if scatter is not None:
            unit.set_custom_reduce_scatter(cast(Any, scatter))

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks, in the group, whose parts this one brings to an exchange."""
        if self._group is None:
            return (self._communicator.rank,)
        return self._group.owners

    @property
    def shared_bytes(self) -> int:
        """See :attr:`ShardedCollectives.shared_bytes`."""
        if self._segments is None:
            return 0
        return self._segments.total_bytes

    def describe(self) -> str:
        """How parameters and gradients travel, for logs."""
        if self._group is None:
            return "FSDP2's own collectives"
        if self._segments is None:
            return "FSDP2's own all-gather, gradients compressed between nodes"
        if self._group.partners is None:
            return "shared memory"
        return "shared memory in each node, the backend between ranks of equal local rank"

    def close(self) -> None:
        """Free memory. The communicator belongs to the caller."""
        if self._segments is not None:
            self._segments.close()


class _MeanOverReplicas:
    """The mean of gradients over the ranks that hold the same share of the parameters."""

    def __init__(self, communicator: Communicator, compression: Compression | None) -> None:
        communicator.zero_copy = False  # each step brings other tensors, so sharing one's memory would not pay
        names = communicator.available()
        self.name = names[0]
        for better in ("hierarchical", "shared_memory"):
            if better in names:
                self.name = better
        self._algorithm = communicator.algorithm(self.name, compression)
        exchange = getattr(self._algorithm, "exchange", None)
        self.feedback: ErrorFeedback | None = getattr(exchange, "feedback", None)
        self.members = communicator.members(self.name, compression)

    def hook(self, layout: UnitLayout, owner: int) -> Callable[[Tensor], None]:
        """What FSDP2 calls with the part of a unit's gradients that is ``owner``'s, flat, after its reduce-scatter."""

        def all_reduce(gradients: Tensor) -> None:
            # Which parameters these are is asked only where something is remembered of them.
            consists_of = Layout.flat(gradients.numel(), layout.number)
            if self.feedback is not None:
                consists_of = layout.reduced([owner], gradients.numel())
            self._algorithm.all_reduce(gradients, consists_of).wait()

        return all_reduce

    def close(self) -> None:
        """Free memory. The communicator belongs to the caller."""
        self._algorithm.close()


def _exchange(partners: dist.ProcessGroup, compression: Compression | None) -> ScatterExchange:
    if compression is None:
        return ScatterExchange(partners)
    feedback = None
    if compression.error_feedback:
        feedback = ErrorFeedback()
    return ScatterExchange(partners, compression.codec(), feedback)


def _require_usable(mesh: DeviceMesh, compression: Compression | None) -> None:
    """Raise ``ValueError`` for what the mesh alone, or the compression alone, tells."""
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"A mesh of {mesh.ndim} dimensions cannot be used to shard parameters: give one dimension (shard), or "
            "two (replicate, shard)."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(f"The dimensions of {mesh} have no names: give `mesh_dim_names=('replicate', 'shard')`.")
    if compression is None:
        return
    if compression.method == "powersgd":
        raise ValueError(
            "compression='powersgd' needs whole matrices of gradients, and sharded parameters have shares of them. "
            "Use 'bf16', 'fp16' or 'int8', or `strategy='smddp'`, which does not shard parameters."
        )
    if compression.scope == "all":
        raise ValueError(
            "compression with scope='all' would compress what stays inside a node, which shared memory and NCCL carry "
            "faster as it is. Use scope='inter_node' with sharded parameters."
        )


def _refuse_uneven(nodes: tuple[tuple[int, ...], ...], compression: Compression | None) -> None:
    if compression is not None:
        raise ValueError(
            f"compression={compression.method!r} of sharded parameters needs equally many ranks on each node, these "
            f"have {_counts(nodes)}. Start as many on each, or set `compression=None`."
        )


def _counts(nodes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(len(ranks)) for ranks in nodes)
