"""What ranks find out together. Collective.

First a short self-test of what training will use: each kind of communicator, with values that are known. Then a few
seconds of measuring: all-reduces by each algorithm, links between nodes, and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.choose import time_algorithm
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.groups import close_group, connect_pairs, create_group, new_name
from lightning_smddp.communication.objects import broadcast, gather
from lightning_smddp.communication.round_trips import round_trips

At = Callable[[str], None]  # is told what is tried next
Nodes = Sequence[Sequence[int]]  # the ranks of each

SIZES = (4, 64 * 2**10, 8 * 2**20)  # bytes of all-reduces
_NUMEL = 1000  # of the tensors of the self-test
_LARGE_BYTES = 8 * 2**20  # of messages between neighbours
_LINK_BYTES = 4 * 2**20  # and between nodes
_ROUNDS = 5  # of messages there and back
_COPIES = 5  # of memory
_MOST_LINKS = 16  # the first neighbours stand for the others
_MOST_NODES = 16  # the first nodes stand for the others
_TIMEOUT = timedelta(seconds=60)  # of making a communicator, and of each collective


def try_paths(group: dist.ProcessGroup, device: torch.device, nodes: Nodes, at: At) -> dict[str, Any]:
    """Use each kind of communicator as training does, and look at what arrives.

    Args:
        group: all ranks.
        device: this rank's.
        nodes: ranks of each node.
        at: is told what is tried next, so that it is known where ranks hang.

    Returns:
        The same on every rank: ``paths``: what was tried -> what is wrong with it, or None; ``neighbours``: the links
        between each rank and the next.

    Raises:
        RankTimeoutError: a rank did not come to make a communicator.
    """
    everyone = list(range(dist.get_world_size(group)))
    problems: dict[str, str | None] = {}
    for what, members in _communicators(dist.get_rank(group), everyone, nodes).items():
        at(what)
        problems[what] = _try_group(members, new_name(group), device)
    what = "messages between neighbours"
    at(what)
    problems[what], links = _try_messages(everyone, new_name(group), device)
    # Ranks of nodes of different size have tried different groups: what any rank has tried is in the result.
    gathered = gather(problems, group)
    found = {}
    for what in dict.fromkeys(chain.from_iterable(gathered)):
        found[what] = _joined([of_rank.get(what) for of_rank in gathered])
    links_of_ranks = gather(links, group)
    neighbours = sorted(chain.from_iterable(links_of_ranks), key=lambda link: link["ranks"])
    return {"paths": found, "neighbours": neighbours}


def _communicators(rank: int, everyone: list[int], nodes: Nodes) -> dict[str, list[int]]:
    """What is tried, by name, with the members of this rank's group. All ranks try the same in the same order."""
    kinds = {"all-reduce of all ranks": everyone}
    (node,) = [list(ranks) for ranks in nodes if rank in ranks]
    if any(len(ranks) > 1 for ranks in nodes):
        kinds["a communicator of a node's ranks"] = node
    sizes = {len(ranks) for ranks in nodes}
    if len(sizes) == 1 and len(nodes) > 1:  # as between nodes, and of a stage's replicas
        local_rank = node.index(rank)
        kinds["a communicator across nodes"] = [ranks[local_rank] for ranks in nodes]
    return kinds


def _joined(texts: Sequence[str | None]) -> str | None:
    said = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    return "; ".join(said) or None


def _try_group(members: list[int], name: str, device: torch.device) -> str | None:
    """A communicator of ``members`` alone, and one sum by it."""
    # Several groups of a kind are made at once, one a node, say: each has a name of its own, after its first rank.
    group = create_group(members, f"{name}-{members[0]}", _TIMEOUT, device)
    try:
        tensor = _values(dist.get_rank(), device)
        dist.all_reduce(tensor, group=group)
        expected = sum(_values(member, device) for member in members)
        return _difference(tensor, expected)
    finally:
        close_group(group)


def _try_messages(ranks: list[int], name: str, device: torch.device) -> tuple[str | None, list[dict[str, Any]]]:
    """Messages as between stages, one link after the other: what is wrong, and this rank's links to the next one."""
    group = create_group(ranks, name, _TIMEOUT, device, by_pairs=True)
    pairs = list(pairwise(ranks))[:_MOST_LINKS]
    rank = dist.get_rank()
    problem = None
    links = []
    device_ids = None
    if device.type == "cuda":
        device_ids = [device.index]
    try:
        connect_pairs(group, pairs, device)
        # All ranks wait behind each pair, so that a link is measured while the others are silent.
        for first, second in pairs:
            if rank in (first, second):
                other = first
                if rank == first:
                    other = second
                wrong = _try_both_ways(group, rank, other, device)
                problem = problem or wrong
                link = _link(group, other, _LARGE_BYTES, device)
                if rank == first:
                    links.append({"ranks": [first, second], **link})
            dist.barrier(group=dist.group.WORLD, device_ids=device_ids)
    finally:
        close_group(group)
    return problem, links


def _try_both_ways(group: dist.ProcessGroup, rank: int, other: int, device: torch.device) -> str | None:
    received = torch.zeros(_NUMEL, device=device)
    # The lower rank sends first: no two wait for each other.
    for sends in (rank < other, rank > other):
        if sends:
            dist.send(_values(rank, device), group=group, group_dst=other)
        else:
            dist.recv(received, group=group, group_src=other)
    return _difference(received, _values(other, device))


def _link(group: dist.ProcessGroup, other: int, large_bytes: int, device: torch.device) -> dict[str, float]:
    """Between this rank and ``other``, which calls it too: the time of a small message, the rate of a large one."""
    small = _median_round_trip(group, 1, other, device)
    large = _median_round_trip(group, large_bytes // 4, other, device)
    # There and back: two messages. What the large ones take longer than the small ones is the time of their bytes.
    seconds = max(large - small, 1e-9)
    gigabytes = 2 * large_bytes / 1e9
    latency = small / 2
    return {"latency_us": latency * 1e6, "gigabytes_per_s": gigabytes / seconds}


def _median_round_trip(group: dist.ProcessGroup, numel: int, other: int, device: torch.device) -> float:
    tensor = torch.zeros(numel, device=device)
    seconds = round_trips(group, tensor, other, _ROUNDS)
    return seconds[_ROUNDS // 2]


def _values(rank: int, device: torch.device) -> torch.Tensor:
    return torch.arange(_NUMEL, dtype=torch.float32, device=device) + rank


def _difference(actual: torch.Tensor, expected: Any) -> str | None:
    wrong = int((actual != expected).sum())
    if wrong == 0:
        return None
    return f"{wrong} of {_NUMEL} numbers arrived with other values"


def measure(group: dist.ProcessGroup, device: torch.device, host: str, at: At = lambda what: None) -> dict[str, Any]:
    """Medians of the slowest rank; the same on every rank. Collective over ``group``, which is the world.

    Args:
        group: all ranks.
        device: this rank's.
        host: this rank's, for messages.
        at: is told what comes next.

    Returns:
        ``all_reduce``: algorithm -> seconds for each of ``sizes`` (bytes); ``links``: from rank 0 to the first rank of
        other nodes (or to the next rank of its own node); ``memory_gb_s``: of a copy; ``notes``: what was not possible;
        ``paths`` and ``neighbours``: see :func:`~lightning_smddp.doctor.measuring.try_paths`.
    """
    at("the communication of gradients")
    communicator = Communicator(group, device, _TIMEOUT)
    try:
        nodes = communicator.topology.nodes
        tried = try_paths(group, device, nodes, at)
        at("the algorithms")
        times = {}
        for name in communicator.available():
            times[name] = [time_algorithm(name, communicator, None, size) for size in SIZES]
        peers = [ranks[0] for ranks in nodes[1:]]
        if not peers:
            peers = list(nodes[0][1:2])  # none where rank 0 is alone
        hosts = gather(host, group)
        links = [_link_of_nodes(group, device, peer, hosts[peer]) for peer in peers[:_MOST_NODES]]
        copies = gather(_copied_bytes_per_s(), group)
        return {
            "world_size": communicator.world_size,
            "nodes": [list(ranks) for ranks in nodes],
            "device": device.type,
            "sizes": list(SIZES),
            "all_reduce": times,
            "links": links,
            "memory_gb_s": min(copies) / 1e9,
            "notes": [note for note in communicator.notes if note.startswith("no shared memory")],
            **tried,
        }
    finally:
        communicator.close()


def _copied_bytes_per_s() -> float:
    source = torch.ones(2**20)
    target = torch.empty_like(source)
    # The fastest copy: other processes, and the first touch of memory, slow down some.
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return source.nbytes / max(min(seconds), 1e-6)


def _link_of_nodes(group: dist.ProcessGroup, device: torch.device, peer: int, host: str) -> dict[str, Any]:
    """Between rank 0 and ``peer``; the others wait."""
    # They wait in the broadcast, which rank 0 comes to when it has measured.
    rank = dist.get_rank(group)
    found: dict[str, Any] | None = None
    if rank in (0, peer):
        other = 0
        if rank == 0:
            other = peer
        link = _link(group, other, _LINK_BYTES, device)
        found = {"rank": peer, "host": host, **link}
    of_first_rank: dict[str, Any] = broadcast(found, group)
    return of_first_rank
