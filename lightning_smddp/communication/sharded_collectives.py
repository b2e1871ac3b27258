"""The collectives of sharded parameters: what torch's FSDP2 (``fully_shard``) asks of communication, done by us.

FSDP2 takes an object for each all-gather and each reduce-scatter (``FSDPModule.set_custom_all_gather``,
``set_custom_reduce_scatter``), which it asks for buffers by ``allocate`` and then calls. On CPUs the buffers are memory
that the ranks of a node have in common (``shared_segments.py``)::

    all-gather       one buffer a node: each rank copies its shard to where it belongs. Ranks of equal local rank gather
                     what they have from the other nodes, and copy it there as well. A barrier, done: FSDP2 copies the
                     parameters out of it, as it does out of its own buffer.
    reduce-scatter   the buffer has a part for each rank of the node: FSDP2 copies a rank's gradients there. A barrier;
                     then each rank sums, over all parts, its own slice and those of the ranks of equal local rank on
                     other nodes, to which it sends them.

So inside a node a byte is copied as often as FSDP2 itself copies it, and travels through no socket; between nodes each
travels once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.shared_memory import add_up, sum_dtype, write_scaled
from lightning_smddp.communication.shared_segments import GATHER, REDUCE, SharedSegments

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType

_CHUNK_ELEMENTS = 2**16  # fits the level-2 cache together with the peers' chunks
_ALIGNMENT = 64  # bytes at which a rank's part of a buffer begins
# FSDP2 calls with buffers of `allocate`; where these are not the same memory, values would be silently wrong.
_OTHER_MEMORY = "other memory than `allocate` gave it: this version of torch is not supported."


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

    Attributes:
        notes: why something that is wanted is not used, a sentence each.
    """

    def __init__(self, mesh: DeviceMesh, timeout: timedelta) -> None:
        self.notes: list[str] = []
        self._names: list[str] = []  # of modules
        self._communicator: Communicator | None = None
        self._segments: SharedSegments | None = None
        self._partners: dist.ProcessGroup | None = None  # the ranks of equal local rank, one a node
        if mesh.device_type != "cpu":
            return
        communicator = Communicator(mesh.get_group(mesh.ndim - 1), torch.device("cpu"), timeout)
        self._communicator = communicator
        self.notes += communicator.notes
        counts = [len(ranks) for ranks in communicator.topology.nodes]
        if len(set(counts)) > 1:
            self.notes.append(f"no shared memory: nodes have {counts} ranks, not equally many")
        elif communicator.shared_memory_refusal is None:
            self._segments = SharedSegments(communicator.node_mesh, self._names)
            self._partners = communicator.partners("sharded") if len(counts) > 1 else None

    def attach(self, module: nn.Module) -> None:
        """Let every ``FSDPModule`` in ``module`` communicate by this object, from its next forward on.

        Modules and their order are the same on all ranks. May be called again, for other modules.
        """
        if self._segments is None:
            return
        for name, unit in module.named_modules():
            if isinstance(unit, FSDPModule):
                number = len(self._names)  # the same on all ranks, as the order of modules is
                self._names.append(name or type(module).__name__)
                # FSDP2's base classes of these have no public names.
                gather: Any = SharedAllGather(self._segments, number, self._partners)
                unit.set_custom_all_gather(gather)
                scatter: Any = SharedReduceScatter(self._segments, number, self._partners)
                unit.set_custom_reduce_scatter(scatter)

    def describe(self) -> str:
        """How parameters and gradients travel, for logs."""
        if self._segments is None:
            return "FSDP2's own collectives"
        if self._partners is None:
            return "shared memory"
        return "shared memory in each node, the backend between ranks of equal local rank"

    def close(self) -> None:
        """Free memory, sockets and groups. The modules cannot be run after it. Not collective."""
        if self._segments is not None:
            self._segments.close()
        if self._communicator is not None:
            self._communicator.close()


class _UnitCollective:
    """What the collectives of one unit have in common.

    Args:
        segments: of this node.
        unit: the unit's number, the same on all ranks.
        partners: the ranks of equal local rank, one a node; None on one node.
    """

    def __init__(self, segments: SharedSegments, unit: int, partners: dist.ProcessGroup | None) -> None:
        self._segments = segments
        self._unit = unit
        self._partners = partners
        topology = segments.mesh.topology
        self._rank, self._size = topology.rank, topology.world_size
        self._owners = topology.partners  # on one node this rank alone


class SharedAllGather(_UnitCollective):
    """FSDP2's all-gather of one unit, on CPUs."""

    _address = 0  # of the last output

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The output, one for all ranks of the node: each writes its own shard there, before the call."""
        output = self._segments.lend(self._unit, math.prod(size) * dtype.itemsize).view(dtype)
        self._address = output.data_ptr()
        return output.view(tuple(size))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Begin to gather. The result's ``wait`` waits for what the others bring.

        FSDP2 waits before it copies the parameters out, with ``async_op`` or without: in between it computes.
        """
        # The input is this rank's shard within the output.
        own = self._address + self._rank * input_tensor.nbytes
        if output_tensor.data_ptr() != self._address or input_tensor.data_ptr() != own:
            raise RuntimeError(f"FSDP2 gathers parameters in {_OTHER_MEMORY}")
        if self._partners is None:
            self._segments.begin(GATHER, self._unit, output_tensor.nbytes)
            return _Gathering(self._segments.finish_all)
        gathered = input_tensor.new_empty(len(self._owners), input_tensor.numel())
        sent = dist.all_gather_single(gathered.view(-1), input_tensor, self._partners, async_op=True)
        assert sent is not None

        def complete() -> None:
            sent.wait()
            shards = output_tensor.view(-1, input_tensor.numel())
            for owner, shard in zip(self._owners, gathered, strict=True):
                if owner != self._rank:
                    shards[owner].copy_(shard)
            # Told only now: the node's other ranks read the shards of other nodes where this one has put them.
            self._segments.begin(GATHER, self._unit, output_tensor.nbytes)
            self._segments.finish_all()

        return _Gathering(complete)


class SharedReduceScatter(_UnitCollective):
    """FSDP2's reduce-scatter of one unit, on CPUs."""

    _parts: Tensor | None = None  # between `allocate` and the call: a row of bytes for each rank of the node

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks twice before each call: first for the input, which the others read, then for the output."""
        if self._parts is not None:
            return torch.empty(tuple(size), dtype=dtype)
        mesh = self._segments.mesh
        nbytes = math.prod(size) * dtype.itemsize
        row = -(-nbytes // _ALIGNMENT) * _ALIGNMENT  # rounded up
        self._parts = self._segments.lend(self._unit, row * mesh.size).view(mesh.size, row)
        return self._parts[mesh.rank, :nbytes].view(dtype).view(tuple(size))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        """``output_tensor`` becomes this rank's slice of what ``op`` makes of all ranks' inputs."""
        parts, self._parts = self._parts, None
        if parts is None or parts[self._segments.mesh.rank].data_ptr() != input_tensor.data_ptr():
            raise RuntimeError(f"FSDP2 reduces gradients in {_OTHER_MEMORY}")
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"Gradients are reduced by SUM or AVG, not by {op}: leave out set_gradient_divide_factor.")
        factor = 1.0 / self._size if op == dist.ReduceOp.AVG else 1.0
        self._segments.begin(REDUCE, self._unit, input_tensor.nbytes)
        self._segments.finish_all()
        # `parts` is the last tensor on the segment that this rank has. While it is there nobody gets that memory again,
        # so the peers' gradients stay as they are until this rank has read them.
        output = output_tensor.view(-1)
        sums = output.view(1, -1) if self._partners is None else output.new_empty(len(self._owners), output.numel())
        for owner, total in zip(self._owners, sums, strict=True):
            low = owner * output.nbytes
            _reduce([part[low : low + output.nbytes].view(output.dtype) for part in parts], total, factor)
        if self._partners is not None:  # row i of all partners' goes to partner i, which sums them
            of_nodes = torch.empty_like(sums)
            dist.all_to_all_single(of_nodes, sums, group=self._partners)
            _reduce(list(of_nodes), output, 1.0)


class _Gathering(dist.Work):
    """What FSDP2 waits for before it reads what others have written."""

    def __init__(self, complete: Callable[[], None]) -> None:
        super().__init__()
        self._complete: Callable[[], None] | None = complete

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As long as groups and mesh are patient: ``timeout`` is not heeded."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        return True


def _reduce(terms: list[Tensor], output: Tensor, factor: float) -> None:
    """``output`` becomes ``factor`` times the sum of ``terms``; 16-bit types are summed in fp32 and rounded once."""
    wide = sum_dtype(output.dtype)
    # Chunk by chunk: what is summed stays in cache, and 16-bit types need no more scratch memory than a chunk's.
    scratch = torch.empty(min(_CHUNK_ELEMENTS, output.numel()), dtype=wide)
    in_chunks = [tensor.split(_CHUNK_ELEMENTS) for tensor in (output, *terms)]
    for chunk, *chunks_of_terms in zip(*in_chunks, strict=True):
        total = chunk if wide == chunk.dtype else scratch[: chunk.numel()]
        add_up(chunks_of_terms, total)
        write_scaled(total, factor, chunk)
