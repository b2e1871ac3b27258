"""Which ranks share a node, found out by asking every rank where it runs, never from the order of ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lightning_smddp.communication.objects import gather


def node_identity() -> str:
    """Host name, boot id and network namespace of this process: equal on ranks that share a node.

    The boot id tells apart hosts of one name; the namespace tells apart containers of one host that have a network
    of their own.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):  # only Linux has them
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return "/".join(parts)


@dataclass(frozen=True)
class Topology:
    """The ranks of each node. Nodes are numbered by their lowest rank, local ranks by rank.

    Attributes:
        nodes: for each node its global ranks, ascending.
        rank: this process's global rank.
        hosts: for each node the host name, for messages.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int
    hosts: tuple[str, ...]

    @classmethod
    def from_identities(cls, identities: Sequence[str], rank: int) -> Topology:
        """Group ranks by equal identity: ``["a", "b", "a"]`` gives ``((0, 2), (1,))``."""
        members: dict[str, list[int]] = {}
        for other, identity in enumerate(identities):
            members.setdefault(identity, []).append(other)
        nodes = [tuple(ranks) for ranks in members.values()]
        hosts = [identity.split("/")[0] for identity in members]
        return cls(tuple(nodes), rank, tuple(hosts))

    @property
    def world_size(self) -> int:
        """Ranks of all nodes together."""
        return sum(len(ranks) for ranks in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Groups of ranks that share memory: machines, or what the launcher takes for machines."""
        return len(self.nodes)

    @property
    def node_rank(self) -> int:
        """Number of this rank's node, by the lowest ranks of nodes."""
        return self._node_of(self.rank)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Global ranks on this rank's node."""
        return self.nodes[self.node_rank]

    @property
    def local_rank(self) -> int:
        """Position of this rank on its node."""
        return self.local_ranks.index(self.rank)

    @property
    def num_shards(self) -> int:
        """In how many shards a bucket is cut between nodes: as many as the smallest node has ranks."""
        return min(len(ranks) for ranks in self.nodes)

    @property
    def partners(self) -> tuple[int, ...]:
        """The global ranks of this rank's local rank, one a node, that exchange a shard; none if it has no shard."""
        # With nodes (0, 2) and (1, 3, 4) there are two shards: partners are (0, 1) and (2, 3), and rank 4 has none.
        local_rank = self.local_rank
        return tuple(ranks[local_rank] for ranks in self.nodes) if local_rank < self.num_shards else ()

    def describe(self, rank: int) -> str:
        """``rank 3 (host b, local rank 1)``, for messages."""
        node = self._node_of(rank)
        return f"rank {rank} (host {self.hosts[node]}, local rank {self.nodes[node].index(rank)})"

    def _node_of(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)


def discover(group: dist.ProcessGroup) -> Topology:
    """Ask all ranks of ``group`` where they run. Collective."""
    return Topology.from_identities(gather(node_identity(), group), group.rank())


def local_shard(numel: int, num_shards: int, local_rank: int) -> slice:
    """A local rank's part of ``range(numel)``, of ``num_shards`` nearly equal ones; empty for each further rank.

    A node has such ranks if it has more than another one: see :attr:`Topology.num_shards`.
    """
    low, high = [numel * min(shard, num_shards) // num_shards for shard in (local_rank, local_rank + 1)]
    return slice(low, high)
