"""The groups of a job, and the algorithms built on them."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.algorithms import (
    Algorithm,
    IntraNodeGroup,
    IntraNodeReduce,
    Native,
    SharedMemoryAllReduce,
    TwoLevel,
)
from lightning_smddp.communication.compression import Compression, ErrorFeedback, ExactCodec, Int8Codec
from lightning_smddp.communication.groups import close_group, create_group, new_name
from lightning_smddp.communication.inter_node import BalancedExchange, InterNodeReduce, RingExchange
from lightning_smddp.communication.node_mesh import NodeMesh, OnWait
from lightning_smddp.communication.objects import RankFailedError, each, gather
from lightning_smddp.communication.shared_memory import HOW_TO_RAISE, SharedMemory
from lightning_smddp.communication.topology import discover

_SELF_TEST_NUMEL = 100_003  # a prime: no shard, chunk or part divides it


class Communicator:
    """This rank's position in the job and its links to the others. Creation is collective over ``group``.

    Args:
        group: the ranks that share gradients: all of the job, or one of several groups of them.
        device: where the gradients are.
        timeout: how long a collective waits for a peer.
        on_wait: called when this rank waited inside its node.
        gradient_bytes: of one rank, to find out whether the buckets fit in shared memory.
        apart: use a new group of the same ranks, as another thread works on ``group`` at the same time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        on_wait: OnWait | None = None,
        gradient_bytes: int = 0,
        apart: bool = False,
    ) -> None:
        self.group = group
        self.device = device
        self.timeout = timeout
        self.on_wait = on_wait
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._name = new_name(group)
        if apart:
            ranks = dist.get_process_group_ranks(group)
            self.group = create_group(ranks, f"{self._name}-apart", timeout, device)
            self._groups["apart", ()] = self.group
        self.topology = discover(self.group)
        self.world_size = self.topology.world_size
        self.rank = self.topology.rank
        self.notes: list[str] = []
        self._meshes: list[NodeMesh] = []
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="lightning_smddp")
        self.zero_copy = True
        self.shared_memory_refusal: str | None = self._connect(gradient_bytes)

    def _connect(self, gradient_bytes: int) -> str | None:
        """Build the node's meshes; returns why shared memory cannot be used, if so.

        Every decision is one of all ranks: one that went its own way would wait for the others in the first bucket.
        """
        if self.device.type != "cpu":
            return f"shared memory is for CPU gradients, these are on {self.device.type}"
        if all(len(ranks) == 1 for ranks in self.topology.nodes):
            return "no node has more than one rank"
        if sys.platform != "linux":
            return f"shared memory needs Linux, this is {sys.platform}"
        lacking = max(gather(gradient_bytes * len(self.topology.local_ranks) - _free_bytes(), self.group))
        self.zero_copy = lacking <= 0
        try:
            # Two meshes, as two threads work at the same time: the one of backward, and the one that gathers.
            for _ in range(2):
                self._meshes.append(NodeMesh.connect(self.topology, self.group, self.timeout))
            left = next(filter(None, each(self._self_test, self.group)), None)
            if left is not None:
                raise left
        except (OSError, RuntimeError, ValueError) as error:
            self.interrupt()
            self.notes.append(f"no shared memory: {error}")
            return str(error)
        if lacking > 0:
            self.notes.append(f"gradients are copied, /dev/shm lacks {lacking / 2**20:.0f} MiB. {HOW_TO_RAISE}")
        return None

    def _self_test(self) -> RankFailedError | None:
        """Raise ``RuntimeError`` if a sum in shared memory is wrong; returns which peer did not come."""
        values = torch.arange(_SELF_TEST_NUMEL, dtype=torch.float64)
        summed = values + self.rank
        memory = SharedMemory(self._meshes[0], zero_copy=self.zero_copy)
        try:
            memory.all_reduce(summed, slot=0)
        except Exception as error:
            self.interrupt()  # peers that wait for this rank go on
            if isinstance(error, RankFailedError):  # that rank tells the cause, if it has one
                return error
            raise
        finally:
            memory.close()
        ranks = self.topology.local_ranks
        if not torch.equal(summed, values * len(ranks) + sum(ranks)):
            raise RuntimeError(f"the self-test on rank {self.rank} has a wrong sum")
        return None

    @property
    def node_mesh(self) -> NodeMesh:
        """The mesh of this node's ranks that the training thread uses. Only where shared memory is not refused."""
        return self._meshes[0]

    def available(self) -> list[str]:
        """Algorithms that make sense here, ``native`` first."""
        if self.topology.num_nodes > 1:
            return ["native", "hierarchical", "balanced"]
        if self.shared_memory_refusal is None:
            return ["native", "shared_memory"]
        return ["native"]

    def algorithm(
        self, name: str, compression: Compression | None = None, feedback: ErrorFeedback | None = None
    ) -> Algorithm:
        """The algorithm of that name on this job's groups. Collective: it may create groups, ready for use.

        Args:
            name: one of ``available``.
            compression: of what goes between nodes, by a codec.
            feedback: remembers what that loses.

        Raises:
            ValueError: ``shared_memory`` across nodes or where it does not work.
        """
        if not self.compresses(compression):
            compression = feedback = None
        # Without a level inside the node all ranks exchange compressed values with each other: `native` has none, and
        # with scope="all" there is to be none.
        is_flat = compression is not None and (name == "native" or compression.scope == "all")
        topology = self.topology
        if not is_flat:
            if name == "native" or self.world_size == 1:
                return Native(self.group)
            if name == "shared_memory":
                self._require_one_node()
                return SharedMemoryAllReduce(self._memory(0))
            is_flat = name == "balanced" and topology.num_nodes == 1  # the node's ranks are the servers
        scatter, gather = (None, None) if is_flat else self._inside_node()
        # One exchange for each shard, between its owners, one a node. A rank owns the shard of its local rank, or none
        # where its node has more ranks than another one.
        ranks: tuple[int, ...] = ()
        if is_flat:
            ranks = tuple(range(self.world_size))
        elif topology.num_nodes > 1:
            ranks = topology.partners
        exchange = self._exchange(name, ranks, compression, feedback) if ranks else None
        return TwoLevel(self.world_size, self.thread, scatter, gather, exchange)

    def compresses(self, compression: Compression | None) -> bool:
        """Whether there is a link here that ``compression`` applies to."""
        if compression is None:
            return False
        if compression.scope == "all":
            return self.world_size > 1
        return self.topology.num_nodes > 1

    def _require_one_node(self) -> None:
        if self.topology.num_nodes > 1:
            raise ValueError(
                f"algorithm='shared_memory' works inside one node, these ranks are on {self.topology.num_nodes}. "
                "Use algorithm='hierarchical': shared memory inside each node, the network between them."
            )
        if self.shared_memory_refusal is not None:
            raise ValueError(
                f"algorithm='shared_memory' cannot be used: {self.shared_memory_refusal}. Use algorithm='auto'."
            )

    def _memory(self, mesh: int) -> SharedMemory:
        return SharedMemory(self._meshes[mesh], self.topology.num_shards, self.on_wait, self.zero_copy)

    def group_of_all(self, purpose: str) -> dist.ProcessGroup:
        """A group of all ranks, for one purpose. Collective."""
        return self._new_group(purpose, tuple(range(self.world_size)))

    def _inside_node(self) -> tuple[IntraNodeReduce | None, IntraNodeReduce | None]:
        """What scatters and what gathers inside this node; None for both where that would be a group of one rank."""
        topology = self.topology
        if self.shared_memory_refusal is None:
            return self._memory(0), self._memory(1)
        if len(topology.local_ranks) == 1:
            return None, None
        scatter = self._new_group("scatter", topology.local_ranks)
        gather = self._new_group("gather", topology.local_ranks)
        return IntraNodeGroup(scatter, topology.num_shards), IntraNodeGroup(gather, topology.num_shards)

    def _exchange(
        self, name: str, ranks: tuple[int, ...], compression: Compression | None, feedback: ErrorFeedback | None
    ) -> InterNodeReduce:
        """The exchange among ``ranks``, of which this is one. Collective over them."""
        # Two groups, as an exchange starts in one thread and ends in another.
        first = self._new_group("start", ranks)
        second = self._new_group("finish", ranks)
        codec = ExactCodec() if compression is None else compression.codec()
        if name == "balanced" or isinstance(codec, Int8Codec):  # which cannot be added up on the way round a ring
            return BalancedExchange(first, second, codec, feedback)
        return RingExchange(first, codec, feedback)

    def _new_group(self, purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """A group of ``ranks`` for each purpose, of which this is one, kept for the next time. Collective over them."""
        key = (purpose, ranks)
        if key not in self._groups:
            global_ranks = [dist.get_global_rank(self.group, rank) for rank in ranks]
            name = f"{self._name}-{purpose}-{ranks}"
            self._groups[key] = create_group(global_ranks, name, self.timeout, self.device)
        return self._groups[key]

    def node_group(self, purpose: str) -> dist.ProcessGroup:
        """A group of this node's ranks, for one purpose. Collective over them."""
        return self._new_group(purpose, self.topology.local_ranks)

    def partners(self, purpose: str) -> dist.ProcessGroup | None:
        """A group of :attr:`Topology.partners`; None where a node has none. Collective over them."""
        ranks = self.topology.partners
        return self._new_group(purpose, ranks) if ranks else None

    def interrupt(self) -> None:
        """Close sockets: what waits for this node's ranks fails, here and on them. Before :meth:`close`, too."""
        for mesh in self._meshes:
            mesh.close()
        self._meshes = []

    def close(self) -> None:
        """Close sockets and groups, after the algorithms. Not collective."""
        self.thread.shutdown()  # first: what it still does goes over meshes and groups
        self.interrupt()
        for group in self._groups.values():
            close_group(group)
        self._groups.clear()


def reduce_once(algorithm: Algorithm, tensor: Tensor, slot: int = 0) -> Tensor:
    """All-reduce a tensor of any shape outside of training and wait: for tests and timings."""
    algorithm.all_reduce(tensor.view(-1), slot).wait()
    return tensor


def _free_bytes() -> int:
    """Free space of the mount that zero-copy buckets live on."""
    if not os.path.isdir("/dev/shm"):
        return 0
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize
