"""The collectives of sharded parameters: what torch's FSDP2 (``fully_shard``) asks of communication, done by us.

FSDP2 takes an object for its all-gather and one for its reduce-scatter (``FSDPModule.set_custom_all_gather`` and
``set_custom_reduce_scatter``). Each is asked for its buffers by ``allocate``, and then called. On CPU ranks of one node
the buffers are memory that the ranks have in common (``shared_segments.py``)::

    all-gather       one buffer a node: each rank copies its shard to where it belongs, a barrier, done.
                     FSDP2 copies the parameters out of it, as it does out of its own buffer.
    reduce-scatter   the buffer has a part for each rank: FSDP2 copies a rank's gradients there, a barrier, and each
                     rank sums its slice of all parts into its own output.

So a byte is copied as often as FSDP2 itself copies it, and travels through no socket. Between nodes, the ranks of equal
local rank exchange what their nodes have in common already: see :class:`ShardedCollectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_smddp.communication.buckets import Layout, sum_dtype
from lightning_smddp.communication.communicator import Communicator, OnWait
from lightning_smddp.communication.shared_memory import add_up
from lightning_smddp.communication.shared_segments import GATHER, REDUCE, SharedSegments

_CHUNK_ELEMENTS = 2**16  # fits the level-2 cache together with the peers' chunks
_ALIGNMENT = 64  # bytes at which a rank's part of a buffer begins
_OTHER_MEMORY = "other memory than `allocate` gave it: this version of torch is not supported."


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

    ============== ======================================= =========================================================
    ranks           parameters and gradients, ``shard``     gradients, ``replicate``
    ============== ======================================= =========================================================
    CPU, one node   shared memory                           shared memory
    CPU, nodes      FSDP2's own on the backend              as ``hierarchical`` of ``communication/algorithms.py``
    GPU             FSDP2's own on NCCL                     FSDP2's own on NCCL
    ============== ======================================= =========================================================

    Args:
        mesh: with one dimension, whose ranks share each parameter, or two, ``(replicate, shard)``: groups of ranks
            that share each parameter, and ranks that hold the same share.
        timeout: how long a collective waits for a rank.
        on_wait: called with ``(seconds, rank waited for last or None)`` when this rank waited inside its node.

    Attributes:
        fsdp_mesh: the mesh for ``fully_shard``: only the dimension ``shard`` of ``mesh`` where the gradients' mean over
            the other dimension is taken here, as FSDP2 would take it again.
        notes: why something that is wanted is not used, a sentence each.

    Raises:
        ValueError: the mesh has another number of dimensions.
    """

    def __init__(self, mesh: DeviceMesh, timeout: timedelta, on_wait: OnWait | None = None) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"A mesh of {mesh.ndim} dimensions cannot be used to shard parameters: give one dimension (shard), or "
                "two (replicate, shard)."
            )
        self.fsdp_mesh = mesh
        self.device = torch.device(mesh.device_type)
        self.notes: list[str] = []
        self._names: list[str] = []
        self._communicators: list[Communicator] = []
        self._segments: SharedSegments | None = None
        self._all_reduce: _MeanOverReplicas | None = None
        if self.device.type != "cpu":
            return
        if mesh.ndim == 2:
            self.fsdp_mesh = mesh[_dimension(mesh, 1)]
            replicas = Communicator(mesh.get_group(0), self.device, timeout, on_wait)
            self._communicators.append(replicas)
            self._all_reduce = _MeanOverReplicas(replicas)
        shards = Communicator(self.fsdp_mesh.get_group(), self.device, timeout, on_wait)
        self._communicators.append(shards)
        self.notes += [note for communicator in self._communicators for note in communicator.notes]
        if shards.topology.num_nodes == 1 and shards.shared_memory_refusal is None:
            self._segments = SharedSegments(shards.node_mesh, self._names, on_wait)

    def attach(self, module: nn.Module) -> None:
        """Let every ``FSDPModule`` in ``module`` communicate by this object, from its next forward on.

        Modules and their order are the same on all ranks. May be called again, for other modules.
        """
        for name, unit in module.named_modules():
            if isinstance(unit, FSDPModule):
                self._attach_unit(name or type(module).__name__, unit)

    def describe(self) -> str:
        """One line for logs: how parameters and gradients travel."""
        if self._segments is not None:
            return "parameters and gradients go through shared memory"
        return "parameters and gradients go through the backend's collectives"

    def close(self) -> None:
        """Free memory, sockets and groups. The modules cannot be run after it. Not collective."""
        if self._all_reduce is not None:
            self._all_reduce.close()
        if self._segments is not None:
            self._segments.close()
        for communicator in self._communicators:
            communicator.close()

    def _attach_unit(self, name: str, unit: FSDPModule) -> None:
        number = len(self._names)
        self._names.append(name)
        if self._segments is not None:
            group = self.fsdp_mesh.get_group()
            # Their base classes have no public names.
            unit.set_custom_all_gather(cast(Any, SharedAllGather(self._segments, number, group)))
            unit.set_custom_reduce_scatter(cast(Any, SharedReduceScatter(self._segments, number, group)))
        if self._all_reduce is not None:
            unit.set_all_reduce_hook(self._all_reduce.hook(number))


class SharedAllGather:
    """FSDP2's all-gather of one unit, of which all ranks are on one node.

    Args:
        segments: of the node.
        unit: the unit's number, the same on all ranks.
        group: the ranks among which the unit's parameters are sharded.
    """

    def __init__(self, segments: SharedSegments, unit: int, group: dist.ProcessGroup) -> None:
        self._segments, self._unit = segments, unit
        self._ranks = dist.get_process_group_ranks(group)
        self._address = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The output, one for all ranks of the node: each writes its own shard there, before the call."""
        output = self._segments.lend(self._unit, math.prod(size) * dtype.itemsize).view(dtype)
        self._address = output.data_ptr()
        return output.view(tuple(size))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Tell the others that this rank's shard is there. The result's ``wait`` waits for theirs.

        FSDP2 waits before it copies the parameters out, with ``async_op`` or without: in between it computes.
        """
        _check_group(group, self._ranks)
        own = self._address + group.rank() * input_tensor.nbytes
        if output_tensor.data_ptr() != self._address or input_tensor.data_ptr() != own:
            raise RuntimeError(f"FSDP2 gathers parameters in {_OTHER_MEMORY}")
        self._segments.begin(GATHER, self._unit, output_tensor.nbytes)
        return _Arrivals(self._segments)


class SharedReduceScatter:
    """FSDP2's reduce-scatter of one unit, of which all ranks are on one node.

    Args:
        segments: of the node.
        unit: the unit's number, the same on all ranks.
        group: the ranks among which the unit's parameters are sharded.
    """

    def __init__(self, segments: SharedSegments, unit: int, group: dist.ProcessGroup) -> None:
        self._segments, self._unit = segments, unit
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = group.rank()
        self._parts: Tensor | None = None  # between `allocate` and the call: a row of bytes for each rank
        self._numel = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks twice before each call: first for the input, which the others read, then for the output."""
        numel = math.prod(size)
        if self._parts is not None and self._numel == numel * len(self._ranks):
            return torch.empty(tuple(size), dtype=dtype)
        row = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        memory = self._segments.lend(self._unit, row * len(self._ranks))
        self._parts, self._numel = memory.view(len(self._ranks), row), numel
        return self._parts[self._rank, : numel * dtype.itemsize].view(dtype).view(tuple(size))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """``output_tensor`` becomes this rank's slice of what ``op`` makes of all ranks' inputs."""
        _check_group(group, self._ranks)
        parts, self._parts = self._parts, None
        if parts is None or parts[self._rank].data_ptr() != input_tensor.data_ptr():
            raise RuntimeError(f"FSDP2 reduces gradients in {_OTHER_MEMORY}")
        self._segments.begin(REDUCE, self._unit, input_tensor.nbytes)
        self._segments.finish_all()
        start = self._rank * output_tensor.nbytes
        slices = [part[start : start + output_tensor.nbytes].view(output_tensor.dtype) for part in parts]
        _reduce(slices, output_tensor.view(-1), _factor(op, len(slices)))


class _Arrivals(dist.Work):
    """What FSDP2 waits for before it reads what the node's ranks have written."""

    def __init__(self, segments: SharedSegments) -> None:
        super().__init__()
        self._segments = segments

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As long as the mesh is patient: ``timeout`` is not heeded."""
        self._segments.finish_all()
        return True


class _MeanOverReplicas:
    """The mean of gradients over the ranks that hold the same share of the parameters."""

    def __init__(self, communicator: Communicator) -> None:
        communicator.zero_copy = False  # each step brings other tensors
        names = communicator.available()
        name = names[0]
        for better in ("hierarchical", "shared_memory"):
            if better in names:
                name = better
        self._algorithm = communicator.algorithm(name)

    def hook(self, unit: int) -> Callable[[Tensor], None]:
        """What FSDP2 calls with the gradients of unit number ``unit``, flat, after its reduce-scatter."""

        def all_reduce(gradients: Tensor) -> None:
            self._algorithm.all_reduce(gradients, Layout.flat(gradients.numel(), unit)).wait()

        return all_reduce

    def close(self) -> None:
        """Free memory. The communicator belongs to the caller."""
        self._algorithm.close()


def _check_group(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Raise ``ValueError`` unless the collective is among ``ranks``."""
    found = dist.get_process_group_ranks(group)
    if found != ranks:
        raise ValueError(
            f"FSDP2 asks for a collective among ranks {found}, where parameters are sharded among {ranks}. This is so "
            "with an integer `reshard_after_forward`: set it to True or False."
        )


def _factor(op: dist.ReduceOp | dist.ReduceOp.RedOpType, size: int) -> float:
    """What the sum is multiplied with."""
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
    scratch = torch.empty(min(_CHUNK_ELEMENTS, output.numel()), dtype=wide)
    for piece, *pieces in zip(*(tensor.split(_CHUNK_ELEMENTS) for tensor in (output, *terms)), strict=True):
        total = piece
        if wide != piece.dtype:
            total = scratch[: piece.numel()]
        add_up(pieces, total)
        if factor != 1.0:
            total.mul_(factor)
        if total is not piece:
            piece.copy_(total)


def _dimension(mesh: DeviceMesh, number: int) -> str:
    """The name of a dimension."""
    if mesh.mesh_dim_names is None:
        raise ValueError(f"The dimensions of {mesh} have no names: give `mesh_dim_names=('replicate', 'shard')`.")
    return mesh.mesh_dim_names[number]
