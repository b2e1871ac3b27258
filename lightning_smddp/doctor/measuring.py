"""A few seconds of measuring: all-reduces by each algorithm, links between nodes, and memory. Collective."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.autotune import time_algorithm
from lightning_smddp.communication.communicator import Communicator
from lightning_smddp.communication.round_trips import round_trips
from lightning_smddp.doctor.paths import At, try_paths
from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.gather import gather_json

SIZES = (4, 64 * 2**10, 8 * 2**20)  # bytes
_LINK_BYTES = 4 * 2**20
_ROUNDS = 5
_COPIES = 5
_MOST_LINKS = 16  # the first nodes stand for the others
_TIMEOUT = timedelta(seconds=60)


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
        ``paths`` and ``neighbours``: see :func:`~lightning_smddp.doctor.paths.try_paths`.
    """
    at("the communication of gradients")
    communicator = Communicator(group, device, _TIMEOUT)
    try:
        tried = try_paths(group, device, communicator.topology.nodes, _TIMEOUT, at)
        at("the algorithms")
        names = communicator.available()
        times = {name: time_algorithm(name, communicator, None, list(SIZES)) for name in names}
        nodes = communicator.topology.nodes
        peers = [ranks[0] for ranks in nodes[1:]] or list(nodes[0][1:2])
        hosts = gather_json(host, group, device)
        links = [_link(group, device, peer, hosts[peer]) for peer in peers[:_MOST_LINKS]]
        copies = gather_json(_copied_bytes_per_s(), group, device)
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
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return source.nbytes / max(min(seconds), 1e-6)


def _link(group: dist.ProcessGroup, device: torch.device, peer: int, host: str) -> dict[str, Any]:
    """Between rank 0 and ``peer``; the others wait."""
    rank, found = dist.get_rank(group), None
    if rank in (0, peer):
        (other,) = {0, peer} - {rank}
        small = _median_round_trip(group, torch.zeros(1, device=device), other)
        large = _median_round_trip(group, torch.zeros(_LINK_BYTES // 4, device=device), other)
        speed = 2 * _LINK_BYTES / max(large - small, 1e-9) / 1e9
        found = {"rank": peer, "host": host, "latency_us": small / 2 * 1e6, "gigabytes_per_s": speed}
    link: dict[str, Any] = broadcast_json(found, group, device)
    return link


def _median_round_trip(group: dist.ProcessGroup, tensor: torch.Tensor, other: int) -> float:
    return round_trips(group, tensor, other, _ROUNDS)[_ROUNDS // 2]
