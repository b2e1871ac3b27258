"""How the ranks of a job find together and start the default process group, within ``init_timeout``.

1. Rank 0 serves torch's key-value store at ``MASTER_ADDR``, ``MASTER_PORT``, unless torchrun's agent does.
2. Every rank appends a line to one list there: who it is, or later that it waits no longer.
3. Every rank reads the list up to the line that decides. Lines have one order for all, so all come to the same error.
4. ``init_process_group`` connects the ranks over the same store.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import lightning_smddp
from lightning_smddp._compat.torch import is_nccl, set_group_timeout
from lightning_smddp.communication.groups import backend_timeout

JOB = "LIGHTNING_SMDDP_JOB"  # the variable that a script's first process gives to those that it starts
NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"
_MOST_INIT_TIMEOUT = timedelta(minutes=10)  # by default
_RUN_VARIABLES = ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", JOB]
_FAREWELL_S = 2.0  # for the others to read what has decided, in a store that ends with rank 0
_starts = itertools.count()  # the same on all ranks: a store may outlive a process group


class StartError(ValueError):
    """The ranks of a job did not find together. The message is one line, and the same on every rank that is there."""


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself.

    Attributes:
        rank: global rank that it was started as.
        world_size: number of ranks that it was told.
        versions: package -> version, of packages that have to be the same on all ranks.
    """

    rank: int
    world_size: int
    versions: Mapping[str, str]
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def versions(lightning: str) -> dict[str, str]:
    """The versions on a card, given Lightning's. 2.13.0+cpu and 2.13.0+cu130 are builds of one version."""
    release = torch.__version__.split("+")[0]
    return {"torch": release, "lightning": lightning, "lightning_smddp": lightning_smddp.__version__}


def start_limit(init_timeout: timedelta | None, timeout: timedelta | None) -> timedelta:
    """How long to wait for other ranks to start: ``init_timeout``; else ``timeout``, but 10 minutes at most."""
    return init_timeout or min(timeout or _MOST_INIT_TIMEOUT, _MOST_INIT_TIMEOUT)


def join(
    card: RankInfo,
    address: tuple[str, int],
    backend: str,
    device: torch.device | None,
    timeout: timedelta,
    init_timeout: timedelta,
) -> None:
    """Start the default process group. Collective. ``default_store()`` is the job's store from then on.

    Args:
        card: of this rank.
        address: name or address of rank 0's machine, and the TCP port there.
        backend: of the group.
        device: this rank's accelerator, or None.
        timeout: of the group's collectives.
        init_timeout: how long to wait for the other ranks, and then to connect; gloo waits five times as long for those
            that could not connect to this one.

    Raises:
        StartError: in ``init_timeout`` and a moment, the same on every rank of the job that is there. One line.
    """
    store = _in_time(card, address, init_timeout)
    # Only groups of gloo and NCCL can be given another timeout later.
    resettable = backend in ("gloo", NCCL_AND_GLOO)
    to_connect = min(init_timeout, timeout) if resettable else timeout
    try:
        dist.init_process_group(backend, None, to_connect, card.world_size, card.rank, store, device_id=device)
    except RuntimeError as error:
        reason, _, _ = str(error).partition("\n")
        cure = "Name the interface that reaches the other nodes in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME)."
        raise StartError(f"All ranks came, but {backend} could not connect {card}: {reason}. {cure}") from None
    store.set_timeout(timeout)
    if resettable:
        set_group_timeout(backend_timeout(timeout, is_nccl()))


def _in_time(card: RankInfo, address: tuple[str, int], limit: timedelta) -> dist.Store:
    """:func:`_meet`, in a thread: a server that accepts and is silent, or stopped, holds torch's client without limit.

    Raises :class:`StartError` where there is no store, or none any more.
    """
    future: futures.Future[dist.Store] = futures.Future()

    def run() -> None:
        try:
            future.set_result(_meet(card, address, limit))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lightning_smddp_start", daemon=True).start()
    try:
        return future.result(limit.total_seconds() + 2 * _FAREWELL_S)
    except (futures.TimeoutError, RuntimeError) as error:
        reason, _, _ = str(error).partition("\n")
    if "EADDRINUSE" in reason:
        reason = "the port is in use (EADDRINUSE), perhaps by another job"
    try:
        socket.create_connection(address, timeout=_FAREWELL_S).close()
    except (OSError, UnicodeError) as error:
        reason = str(error)
    raise StartError(
        f"{card} cannot use the job's store at MASTER_ADDR={address[0]} MASTER_PORT={address[1]}, init_timeout="
        f"{limit.total_seconds():g} s: {reason or 'what listens there does not answer as rank 0 does'}. The address "
        "has to be of rank 0's machine, and the port open to all ranks and no other program's."
    )


def _meet(card: RankInfo, address: tuple[str, int], limit: timedelta) -> dist.Store:
    """The store of this start, when all ranks are there."""
    deadline = time.monotonic() + limit.total_seconds()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The agent's store outlives the ranks; without it a node that came later would count from 0 for itself.
    restarts = "TORCHELASTIC_RESTART_COUNT" if by_agent else ""
    run = "/".join([os.environ.get(name, "") for name in [*_RUN_VARIABLES, restarts]])
    serves = card.rank == 0 and not by_agent
    listener = _listen(address) if serves else None
    # Multi-tenant: a server that this process has already, for an earlier group, is used again.
    store = dist.TCPStore(
        *address, None, serves, limit, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener
    )
    of_start = dist.PrefixStore(f"lightning_smddp/{run}/{next(_starts)}", store)
    error = wait_for_ranks(of_start, card, deadline, limit)
    if error is not None:
        time.sleep(_FAREWELL_S)
        raise StartError(error)
    return of_start


def _listen(address: tuple[str, int]) -> int | None:
    """A socket of IPv4 for the store. On one of torch's own each client costs a question to the name server.

    None where only torch can listen: by IPv6 alone, or where this process does already. Else torch says what is wrong.
    """
    with suppress(OSError, UnicodeError):
        socket.gethostbyname(address[0])
        return socket.create_server(("", address[1]), backlog=4096).detach()
    return None


def wait_for_ranks(store: Any, card: RankInfo, deadline: float, limit: timedelta) -> str | None:
    """Put ``card`` on the list and wait until all ranks are there; returns why they cannot start, or None.

    ``store`` is torch's, whose type hints lack ``append``; ``limit`` is what ``deadline`` (of ``time.monotonic()``)
    came from, for the message.
    """
    store.append("ranks", json.dumps(asdict(card)) + "\n")
    while True:
        cards, error = read(store.get("ranks").decode().splitlines())
        first, holder = next(iter(cards.values())), cards.get(card.rank)
        if error is None and holder != card:  # the others start, or wait, without this one
            cure = "Give every process a rank of its own (RANK, NODE_RANK), and every job a port (MASTER_PORT)."
            twice = f"Two processes are the same rank: {holder}, which goes on, and {card}. {cure}"
            error = contradiction(first, card) or twice
        if error is not None or len(cards) == card.world_size:
            return error
        if time.monotonic() > deadline:
            store.append("ranks", json.dumps({"waited": limit.total_seconds()}) + "\n")
        else:
            time.sleep(min(0.05 + card.world_size / 500, 1.0))  # a look costs a message as long as all cards


def read(lines: Iterable[str]) -> tuple[dict[int, RankInfo], str | None]:
    """The ranks that have come, and why they cannot start. Lines behind the one that decides count for nothing."""
    cards: dict[int, RankInfo] = {}
    for line in lines:
        entry = json.loads(line)
        if "waited" in entry:
            return cards, _absent(list(cards.values()), entry["waited"])
        card = RankInfo(**entry)
        error = contradiction(next(iter(cards.values()), card), card)
        cards.setdefault(card.rank, card)
        if error is not None or len(cards) == card.world_size:
            return cards, error
    return cards, None


def contradiction(first: RankInfo, card: RankInfo) -> str | None:
    """Why the two can never be ranks of one job; None if they can."""
    if not 0 <= card.rank < card.world_size:
        return f"{card} is outside of a world of {card.world_size} ranks. Correct the launcher's node rank, or numbers."
    theirs = {"world size": card.world_size, **card.versions}
    for what, value in {"world size": first.world_size, **first.versions}.items():
        if theirs[what] != value:
            sides = f"{first} has {value}, {card} has {theirs[what]}"
            return f"The ranks disagree about the {what}: {sides}. Give all one WORLD_SIZE, and the same packages."
    return None


def _absent(cards: Sequence[RankInfo], waited_s: float) -> str:
    missing = set(range(cards[0].world_size)) - {card.rank for card in cards}
    hosts: dict[str, list[int]] = {}
    for card in cards:
        hosts.setdefault(card.host, []).append(card.rank)
    there = ", ".join([f"{host}: {sorted(ranks)}" for host, ranks in sorted(hosts.items())])
    return (
        f"After init_timeout={waited_s:g} s {len(missing)} of {cards[0].world_size} ranks are missing: "
        f"{sorted(missing)}. There are, by host, {there}. Look at the missing ranks' own output, or raise the timeout."
    )
