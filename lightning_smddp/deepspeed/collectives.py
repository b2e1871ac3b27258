"""DeepSpeed's three large collectives on CPU ranks, done by this package: importing this imports DeepSpeed.

DeepSpeed calls ``deepspeed.comm``, which hands everything to one object, ``deepspeed.comm.comm.cdb``. Ours is put there
for the time of a run. Of ZeRO's traffic it takes what is large, among all ranks, in floating point:

=========================== ============================================ ==========================================
collective                  stage                                        how
=========================== ============================================ ==========================================
``all_reduce``              1 and 2: gradients                           ``shared_memory``, ``hierarchical``
``all_gather_into_tensor``  1 and 2: parameters after a step; 3: always  as FSDP2's units (``unit_collectives.py``)
``reduce_scatter_tensor``   3: gradients                                 as FSDP2's units
=========================== ============================================ ==========================================

All else, and everything on GPUs, is the backend's; so are the last two where nodes have different numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import deepspeed.comm.comm
import torch.distributed as dist
from deepspeed.comm.torch import Noop, TorchBackend
from torch import Tensor

from lightning_smddp.communication.algorithms import SharedMemoryAllReduce
from lightning_smddp.communication.buckets import Layout
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.shared_segments import SharedSegments
from lightning_smddp.communication.topology import Topology
from lightning_smddp.communication.unit_collectives import ShardGroup, SharedAllGather, SharedReduceScatter

_MIN_ELEMENTS = 2**12  # less costs the same either way
_NAMES = ["ZeRO's parameters", "ZeRO's gradients"]  # of the two kinds of segments, for messages


class NodeCollectives(TorchBackend):  # type: ignore[misc]  # DeepSpeed has no types
    """A backend of ``deepspeed.comm`` over the links of a communicator. Creation is collective.

    Args:
        communicator: of all ranks, whose tensors are on the CPU. It belongs to the caller.
        timeout: of the process group, which there is already.
    """

    def __init__(self, communicator: Communicator, timeout: timedelta) -> None:
        super().__init__(dist.get_backend(communicator.group), timeout, None)
        communicator.zero_copy = False  # DeepSpeed reduces other parts of its buffers each time
        self._group = communicator.group
        self._ranks = dist.get_process_group_ranks(communicator.group)
        names = communicator.available()
        name = names[0]
        for better in ("hierarchical", "shared_memory"):  # the better, the later
            if better in names:
                name = better
        self._algorithm = communicator.algorithm(name)
        self._segments: SharedSegments | None = None
        if communicator.shared_memory_refusal is None and _is_even(communicator.topology):
            self._share_segments(communicator)

    def _share_segments(self, communicator: Communicator) -> None:
        """Memory of the node for gathering and scattering, each of which is one unit to the classes for FSDP2."""
        # Inside a node ranks sum and gather through shared memory; with the partners, the ranks of equal local rank in
        # other nodes, each exchanges what it is responsible for.
        partners = None
        if communicator.topology.num_nodes > 1:
            partners = communicator.partners("sharded")
            assert partners is not None
        group = ShardGroup(self._ranks, communicator.topology, partners)
        self._segments = SharedSegments(communicator.node_mesh, _NAMES, communicator.on_wait)
        self._gather = SharedAllGather(self._segments, 0, group)
        self._scatter = SharedReduceScatter(self._segments, 1, group)

    def describe(self) -> str:
        """How gradients and parameters travel."""
        if self._segments is None:
            return f"gradients are summed by {self._algorithm.name}, parameters go through the backend"
        if self._algorithm.name == "shared_memory":
            return "shared memory"
        return "shared memory in each node, the backend between ranks of equal local rank"

    def close(self) -> None:
        """Free the shared memory; the communicator's links stay. Not collective."""
        self._algorithm.close()
        if self._segments is not None:
            self._segments.close()

    def _is_large(self, tensor: Tensor, group: Any) -> bool:
        """Whether it is worth it, and what the links carry."""
        if tensor.numel() < _MIN_ELEMENTS or not tensor.is_floating_point() or tensor.device.type != "cpu":
            return False
        if not tensor.is_contiguous():
            return False
        # The links are between all ranks, in this order; what goes through a smaller group is the backend's.
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return bool(ranks == self._ranks)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """As ``torch.distributed.all_reduce``; complete when it returns."""
        is_sum = self._reduce_op(op) == dist.ReduceOp.SUM
        if not is_sum or not self._is_large(tensor, group):
            return super().all_reduce(tensor, op, group, async_op)
        flat = tensor.view(-1)
        if isinstance(self._algorithm, SharedMemoryAllReduce):
            self._algorithm.memory.all_reduce(flat, slot=None)
        else:
            work = self._algorithm.all_reduce(flat, Layout.flat(flat.numel()))
            work.wait()
            flat.mul_(len(self._ranks))  # it gives the mean
        return Noop()

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """As ``torch.distributed.all_gather_into_tensor``; complete when it returns. The input may be in the output."""
        if self._segments is None or not self._is_large(output_tensor, group) or not input_tensor.is_contiguous():
            return super().all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        # What `allocate` gives is memory of the node: each rank writes its part there, and the exchange waits for the
        # others', and brings those of other nodes. Then each rank copies the whole out.
        gathered = self._gather.allocate(
            [output_tensor.numel()],
            dtype=output_tensor.dtype,
            device=output_tensor.device,
        )
        count = input_tensor.numel()
        start = dist.get_rank() * count
        own = gathered[start : start + count]
        own.copy_(input_tensor.view(-1))
        work = self._gather(gathered, own, self._group)
        work.wait()
        output_tensor.copy_(gathered.view(output_tensor.shape))
        return Noop()

    def reduce_scatter_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """As ``torch.distributed.reduce_scatter_tensor``; complete when it returns. The output may be in the input."""
        kind = self._reduce_op(op)
        takes = kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and output_tensor.is_contiguous()
        if self._segments is None or not takes or not self._is_large(input_tensor, group):
            return super().reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        # Likewise: each rank lays its whole input into memory of the node, and each sums its own part there.
        given = self._scatter.allocate(
            [input_tensor.numel()],
            dtype=input_tensor.dtype,
            device=input_tensor.device,
        )
        given.copy_(input_tensor.view(-1))
        self._scatter(output_tensor.view(-1), given, self._group, kind)
        return Noop()


def _is_even(topology: Topology) -> bool:
    """Whether all nodes have equally many ranks."""
    return len({len(ranks) for ranks in topology.nodes}) == 1


@contextmanager
def carried_by(backend: NodeCollectives) -> Iterator[None]:
    """In this context ``deepspeed.comm`` uses ``backend``."""
    before = deepspeed.comm.comm.cdb
    deepspeed.comm.comm.cdb = backend
    try:
        yield
    finally:
        deepspeed.comm.comm.cdb = before
        backend.close()
