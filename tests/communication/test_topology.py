"""Which ranks share a node, and how a tensor is cut between them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_smddp.communication.topology import Topology, discover, local_shard, node_identity
from tests.ranks import run_in_threads


@pytest.mark.parametrize(
    ("identities", "nodes"),
    [
        (["a"], ((0,),)),
        (["a", "a", "b", "b"], ((0, 1), (2, 3))),
        (["a", "b", "a", "b"], ((0, 2), (1, 3))),
        (["b", "a", "a", "a"], ((0,), (1, 2, 3))),
        (["c", "b", "a"], ((0,), (1,), (2,))),
        (["x/boot1", "x/boot2"], ((0,), (1,))),
    ],
)
def test_equal_identities_share_a_node(identities: list[str], nodes: tuple[tuple[int, ...], ...]) -> None:
    topology = Topology.from_identities(identities, 0)
    assert topology.nodes == nodes
    assert topology.num_shards == min(map(len, nodes))


def test_places_of_a_rank_on_interleaved_nodes() -> None:
    identities = ["x/1", "y/1", "x/1", "y/1", "x/1"]
    topology = Topology.from_identities(identities, rank=3)
    assert (topology.world_size, topology.num_nodes) == (5, 2)
    assert (topology.node_rank, topology.local_rank, topology.local_ranks) == (1, 1, (1, 3))
    assert topology.num_shards == 2
    partners = [Topology.from_identities(identities, rank).partners for rank in range(5)]
    assert partners == [(0, 1), (0, 1), (2, 3), (2, 3), ()]
    assert topology.hosts == ("x", "y")


def test_describe_names_host_and_local_rank() -> None:
    topology = Topology.from_identities(["x/1", "y/1", "y/1"], 0)
    assert topology.describe(2) == "rank 2 (host y, local rank 1)"


def discovered(group: dist.ProcessGroup) -> tuple[tuple[tuple[int, ...], ...], int]:
    topology = discover(group)
    return topology.nodes, topology.rank


def test_discover_asks_every_rank() -> None:
    """Ranks of this machine share a node."""
    assert run_in_threads(discovered, 2) == [(((0, 1),), rank) for rank in range(2)]
    assert node_identity().count("/") >= 2


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 1000, 1000003])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_shards_cover_everything_in_nearly_equal_parts(numel: int, shards: int) -> None:
    parts = [range(numel)[local_shard(numel, shards, rank)] for rank in range(shards)]
    assert len(range(numel)[local_shard(numel, shards, shards)]) == 0  # a rank without a shard
    sizes = [len(part) for part in parts]
    assert [number for part in parts for number in part] == list(range(numel))
    assert max(sizes) - min(sizes) <= 1
