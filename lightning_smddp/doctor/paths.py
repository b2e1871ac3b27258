"""A short self-test of what training will use: each kind of communicator, with values that are known. Collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.groups import close_group, connect_pairs, create_group, new_name
from lightning_smddp.communication.round_trips import round_trips
from lightning_smddp.wire.gather import gather_json

_NUMEL = 1000
_LARGE_BYTES = 8 * 2**20
_ROUNDS = 5
_MOST_LINKS = 16  # the first neighbours stand for the others

At = Callable[[str], None]


def try_paths(
    group: dist.ProcessGroup, device: torch.device, nodes: Sequence[Sequence[int]], timeout: timedelta, at: At
) -> dict[str, Any]:
    """Use each kind of communicator as training does, and look at what arrives.

    Args:
        group: all ranks.
        device: this rank's.
        nodes: ranks of each node.
        timeout: of making a communicator, and of each collective.
        at: is told what is tried next, so that it is known where ranks hang.

    Returns:
        The same on every rank: ``paths``: what was tried -> what is wrong with it, or None; ``neighbours``: the links
        between each rank and the next.

    Raises:
        RankTimeoutError: a rank did not come to make a communicator.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    everyone = list(range(world))
    kinds = {"all-reduce of all ranks": everyone}
    node = next(list(ranks) for ranks in nodes if rank in ranks)
    if any(len(ranks) > 1 for ranks in nodes):
        kinds["a communicator of a node's ranks"] = node
    if len({len(ranks) for ranks in nodes}) == 1 and len(nodes) > 1:  # as between nodes, and of a stage's replicas
        kinds["a communicator across nodes"] = [ranks[node.index(rank)] for ranks in nodes]
    problems: dict[str, str | None] = {}
    for what, members in kinds.items():
        at(what)
        problems[what] = _try_group(members, new_name(group, device), timeout, device)
    at("messages between neighbours")
    problems["messages between neighbours"], links = _try_messages(everyone, new_name(group, device), timeout, device)
    gathered = gather_json(problems, group, device)
    tried = dict.fromkeys(chain.from_iterable(gathered))
    found = {what: _joined([of_rank.get(what) for of_rank in gathered]) for what in tried}
    all_links = chain.from_iterable(gather_json(links, group, device))
    return {"paths": found, "neighbours": sorted(all_links, key=lambda link: tuple(link["ranks"]))}


def _joined(texts: Sequence[str | None]) -> str | None:
    said = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    return "; ".join(said) or None


def _try_group(members: list[int], name: str, timeout: timedelta, device: torch.device) -> str | None:
    """A communicator of ``members`` alone, and one sum by it."""
    group = create_group(members, f"{name}-{members[0]}", timeout, device)
    try:
        tensor = _values(dist.get_rank(), device)
        dist.all_reduce(tensor, group=group)
        expected = sum(_values(member, device) for member in members)
        return _difference(tensor, expected)
    finally:
        close_group(group)


def _try_messages(
    ranks: list[int], name: str, timeout: timedelta, device: torch.device
) -> tuple[str | None, list[dict[str, Any]]]:
    """Messages as between stages, one link after the other: what is wrong, and this rank's links to the next one."""
    group = create_group(ranks, name, timeout, device, by_pairs=True)
    pairs = list(zip(ranks, ranks[1:], strict=False))[:_MOST_LINKS]
    rank, problem, links = dist.get_rank(), None, []
    device_ids = None
    if device.type == "cuda":
        device_ids = [device.index]
    try:
        connect_pairs(group, pairs, device)
        for pair in pairs:
            if rank in pair:
                other = sum(pair) - rank
                wrong = _try_both_ways(group, rank, other, device)
                problem = problem or wrong
                link = _link(group, other, device)
                if rank == pair[0]:
                    links.append({"ranks": list(pair), **link})
            dist.barrier(group=dist.group.WORLD, device_ids=device_ids)
    finally:
        close_group(group)
    return problem, links


def _try_both_ways(group: dist.ProcessGroup, rank: int, other: int, device: torch.device) -> str | None:
    received = torch.zeros(_NUMEL, device=device)
    for sends in (rank < other, rank > other):
        if sends:
            dist.send(_values(rank, device), group=group, group_dst=other)
        else:
            dist.recv(received, group=group, group_src=other)
    return _difference(received, _values(other, device))


def _link(group: dist.ProcessGroup, other: int, device: torch.device) -> dict[str, float]:
    small = round_trips(group, torch.zeros(1, device=device), other, _ROUNDS)[_ROUNDS // 2]
    large = round_trips(group, torch.zeros(_LARGE_BYTES // 4, device=device), other, _ROUNDS)[_ROUNDS // 2]
    speed = 2 * _LARGE_BYTES / max(large - small, 1e-9) / 1e9
    return {"latency_us": small / 2 * 1e6, "gigabytes_per_s": speed}


def _values(rank: int, device: torch.device) -> torch.Tensor:
    return torch.arange(_NUMEL, dtype=torch.float32, device=device) + rank


def _difference(actual: torch.Tensor, expected: Any) -> str | None:
    wrong = int((actual != expected).sum())
    if wrong == 0:
        return None
    return f"{wrong} of {_NUMEL} numbers arrived with other values"
