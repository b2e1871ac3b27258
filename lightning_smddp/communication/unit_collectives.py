"""The all-gather and the reduce-scatter of one unit of sharded parameters, as torch's FSDP2 calls them.

FSDP2 takes an object for each (``FSDPModule.set_custom_all_gather``, ``set_custom_reduce_scatter``), which it asks for
buffers by ``allocate`` and then calls. On CPUs the buffers are memory that the ranks of a node have in common
(``shared_segments.py``)::

    all-gather       one buffer a node: each rank copies its shard to where it belongs. Ranks of equal local rank gather
                     what they have from the other nodes, and copy it there as well. A barrier, done: FSDP2 copies the
                     parameters out of it, as it does out of its own buffer.
    reduce-scatter   the buffer has a part for each rank of the node: FSDP2 copies a rank's gradients there. A barrier;
                     then each rank sums, over all parts, its own slice and those of the ranks of equal local rank on
                     other nodes, to which it sends them.

So inside a node a byte is copied as often as FSDP2 itself copies it, and travels through no socket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat.torch import all_gather_single
from lightning_smddp.communication.shared_memory import add_up, sum_dtype, write_scaled
from lightning_smddp.communication.shared_segments import GATHER, REDUCE, SharedSegments
from lightning_smddp.communication.topology import Topology

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType

_CHUNK_ELEMENTS = 2**16  # fits the level-2 cache together with the peers' chunks
_ALIGNMENT = 64  # bytes at which a rank's part of a buffer begins
# FSDP2 calls with buffers of `allocate`; where these are not the same memory, values would be silently wrong.
_OTHER_MEMORY = "other memory than `allocate` gave it: this version of torch is not supported."


@dataclass(frozen=True)
class ShardGroup:
    """The ranks among which parameters are sharded; each node has equally many of them.

    Attributes:
        ranks: their global ranks.
        topology: the nodes, of ranks within the group.
        partners: those of equal local rank, one a node; None on one node.
    """

    ranks: list[int]
    topology: Topology
    partners: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.topology.rank

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks of equal local rank, by node, within the group."""
        return self.topology.shard_owners(self.topology.local_rank)

    def require(self, group: dist.ProcessGroup) -> None:
        """Raise ``ValueError`` unless ``group`` is this one."""
        found = dist.get_process_group_ranks(group)
        if found != self.ranks:
            raise ValueError(
                f"FSDP2 asks for a collective among ranks {found}, where parameters are sharded among {self.ranks}. "
                "This is so with an integer `reshard_after_forward`: set it to True or False."
            )


class SharedAllGather:
    """FSDP2's all-gather of one unit, on CPUs.

    Args:
        segments: of this node.
        unit: the unit's number, the same on all ranks.
        group: the ranks among which the unit's parameters are sharded.
    """

    def __init__(self, segments: SharedSegments, unit: int, group: ShardGroup) -> None:
        self._segments = segments
        self._unit = unit
        self._group = group
        self._address = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The output, one for all ranks of the node: each writes its own shard there, before the call."""
        nbytes = math.prod(size) * dtype.itemsize
        output = self._segments.lend(self._unit, nbytes).view(dtype)
        self._address = output.data_ptr()
        return output.view(tuple(size))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Begin to gather. The result's ``wait`` waits for what the others bring.

        FSDP2 waits before it copies the parameters out, with ``async_op`` or without: in between it computes.
        """
        self._group.require(group)
        # The input is this rank's shard within the output.
        own = self._address + self._group.rank * input_tensor.nbytes
        if output_tensor.data_ptr() != self._address or input_tensor.data_ptr() != own:
            raise RuntimeError(f"FSDP2 gathers parameters in {_OTHER_MEMORY}")
        partners = self._group.partners
        if partners is None:
            self._segments.begin(GATHER, self._unit, output_tensor.nbytes)
            return _Gathering(self._segments.finish_all)
        owners = self._group.owners
        gathered = input_tensor.new_empty(len(owners), input_tensor.numel())
        sent = all_gather_single(gathered.view(-1), input_tensor, partners, async_op=True)
        assert sent is not None

        def complete() -> None:
            sent.wait()
            shards = output_tensor.view(-1, input_tensor.numel())
            for owner, shard in zip(owners, gathered, strict=True):
                if owner != self._group.rank:
                    shards[owner].copy_(shard)
            # Told only now: the node's other ranks read the shards of other nodes where this one has put them.
            self._segments.begin(GATHER, self._unit, output_tensor.nbytes)
            self._segments.finish_all()

        return _Gathering(complete)


class SharedReduceScatter:
    """FSDP2's reduce-scatter of one unit, on CPUs.

    Args:
        segments: of this node.
        unit: the unit's number, the same on all ranks.
        group: the ranks among which the unit's parameters are sharded.
    """

    def __init__(self, segments: SharedSegments, unit: int, group: ShardGroup) -> None:
        self._segments = segments
        self._unit = unit
        self._group = group
        self._parts: Tensor | None = None  # between `allocate` and the call: a row of bytes for each rank of the node
        self._numel = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks twice before each call: first for the input, which the others read, then for the output."""
        numel = math.prod(size)
        if self._parts is not None and self._numel == numel * len(self._group.ranks):  # the output: one rank's slice
            return torch.empty(tuple(size), dtype=dtype)
        mesh = self._segments.mesh
        nbytes = numel * dtype.itemsize
        row = -(-nbytes // _ALIGNMENT) * _ALIGNMENT  # rounded up
        segment = self._segments.lend(self._unit, row * mesh.size)
        self._parts = segment.view(mesh.size, row)
        self._numel = numel
        own = self._parts[mesh.rank, :nbytes]
        return own.view(dtype).view(tuple(size))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        """``output_tensor`` becomes this rank's slice of what ``op`` makes of all ranks' inputs."""
        self._group.require(group)
        parts = self._parts
        self._parts = None
        if parts is None or parts[self._segments.mesh.rank].data_ptr() != input_tensor.data_ptr():
            raise RuntimeError(f"FSDP2 reduces gradients in {_OTHER_MEMORY}")
        self._segments.begin(REDUCE, self._unit, input_tensor.nbytes)
        self._segments.finish_all()
        # `parts` is the last tensor on the segment that this rank has. While it is there nobody gets that memory again,
        # so the peers' gradients stay as they are until this rank has read them.
        owners = self._group.owners  # on one node this rank alone
        output = output_tensor.view(-1)
        sums = output.view(1, -1)
        partners = self._group.partners
        if partners is not None:
            sums = output.new_empty(len(owners), output.numel())
        factor = factor_of(op, len(self._group.ranks))
        for owner, total in zip(owners, sums, strict=True):
            low = owner * output.nbytes
            high = low + output.nbytes
            slices = [part[low:high].view(output.dtype) for part in parts]
            _reduce(slices, total, factor)
        if partners is not None:  # row i of all partners' goes to partner i, which sums them
            of_nodes = torch.empty_like(sums)
            dist.all_to_all_single(of_nodes, sums, group=partners)
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


def factor_of(op: ReduceOp, size: int) -> float:
    """What the sum over ``size`` ranks is multiplied with."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    if op == dist.ReduceOp.PREMUL_SUM:
        state: Any = op.__getstate__()  # as it is pickled: there is no other way to ask
        return float(state[1])
    raise ValueError(f"Gradients are reduced by SUM, AVG or PREMUL_SUM, not by {op}.")


def _reduce(terms: list[Tensor], output: Tensor, factor: float) -> None:
    """``output`` becomes ``factor`` times the sum of ``terms``; 16-bit types are summed in fp32 and rounded once."""
    wide = sum_dtype(output.dtype)
    # Chunk by chunk: what is summed stays in cache, and 16-bit types need no more scratch memory than a chunk's.
    scratch = torch.empty(min(_CHUNK_ELEMENTS, output.numel()), dtype=wide)
    in_chunks = [tensor.split(_CHUNK_ELEMENTS) for tensor in (output, *terms)]
    for chunk, *chunks_of_terms in zip(*in_chunks, strict=True):
        total = chunk
        if wide != chunk.dtype:
            total = scratch[: chunk.numel()]
        add_up(chunks_of_terms, total)
        write_scaled(total, factor, chunk)
