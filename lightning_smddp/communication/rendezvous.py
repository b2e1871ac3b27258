"""How the ranks of a job find together and start the default process group, within ``init_timeout``.

Where the launcher does not serve a store (torchrun's agent does), rank 0 serves it, on a socket that is bound to the
one address of MASTER_ADDR: torch's own listens on every interface, and a store believes everyone.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from errno import EADDRINUSE, EADDRNOTAVAIL
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp._compat.torch import set_group_timeout
from lightning_smddp.communication.errors import StartError
from lightning_smddp.communication.groups import backend_timeout
from lightning_smddp.communication.network import describe_interfaces, holder_of, interface_problem
from lightning_smddp.communication.rank_info import RankInfo, leave, meet

DEFAULT_INIT_TIMEOUT = timedelta(minutes=10)  # or the strategy's `timeout`, if that is less
_RUN_VARIABLES = ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE"]
_NAME_PATIENCE_S = 60.0  # a cluster's names may come up after its processes
_TELL_PATIENCE_S = 3.0  # to let the others know of a problem of this rank's own
_PROBE_S = 2.0  # for a process that serves this job's store already
_PAUSE_S = 0.1  # between two tries
_LEAST_ANSWER_S = 1.0  # for a store to answer, however late it is
_LEAST_CONNECT_S = 5.0  # for the ranks to connect, however late the last one came
_BACKLOG = 4096  # connections that wait to be accepted: all ranks may come at once
_starts = itertools.count()  # the same on all ranks: an agent's store outlives a process group

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RendezvousConfig:
    """Where the ranks meet, and as whom this process comes.

    Attributes:
        rank: global rank of this process.
        world_size: number of ranks.
        spans_nodes: whether there is more than one node.
        address: host name or address that rank 0 can be reached under.
        port: TCP port there.
        versions: see :func:`~lightning_smddp.communication.rank_info.versions`.
    """

    rank: int
    world_size: int
    spans_nodes: bool
    address: str
    port: int
    versions: Mapping[str, str]


def start_limit(init_timeout: timedelta | None, timeout: timedelta | None) -> timedelta:
    """How long to wait for other ranks to start: ``init_timeout``; else ``timeout``, but 10 minutes at most."""
    if init_timeout:
        return init_timeout
    return min(timeout or DEFAULT_INIT_TIMEOUT, DEFAULT_INIT_TIMEOUT)


def join(
    meeting: RendezvousConfig,
    backend: str,
    device: torch.device | None,
    timeout: timedelta | None,
    init_timeout: timedelta | None = None,
) -> str:
    """Start the default process group. Collective.

    Args:
        meeting: where, and as whom.
        backend: of the group.
        device: this rank's accelerator, or None.
        timeout: of the group's collectives.
        init_timeout: how long to wait for the other ranks; None is 10 minutes, or ``timeout`` if that is less.

    Returns:
        What this rank listens on, for the log; empty if it serves no store.

    Raises:
        StartError: on every rank that is there, within ``init_timeout``; the message is one line.
    """
    limit = start_limit(init_timeout, timeout)
    limit_s = limit.total_seconds()
    deadline = time.monotonic() + limit_s
    problem = interface_problem(backend)
    card = RankInfo(meeting.rank, meeting.world_size, meeting.versions, problem)
    if problem is not None:
        _tell_and_raise(meeting, card)
    store, served = _open_store(meeting, card, deadline, limit)
    store = dist.PrefixStore(_run_key(), store)
    try:
        meet(store, card, deadline, limit_s, serves=bool(served))
    except (RuntimeError, dist.DistError):  # of the store's connection
        raise StartError(_store_ended(meeting)) from None
    _start_group(store, meeting, backend, device, timeout, deadline)
    return served


def _run_key() -> str:
    """A prefix of the keys of this start: another run's, or an earlier one's, are never read."""
    names = list(_RUN_VARIABLES)
    if _agent_serves():  # its store outlives the ranks; else a node that came later would count from 0 for itself
        names.append("TORCHELASTIC_RESTART_COUNT")
    run = "/".join([os.environ.get(name, "") for name in names])
    return f"lightning_smddp/{run}/{next(_starts)}"


def _agent_serves() -> bool:
    """Whether the store is that of torchrun's agent on the first node."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _start_group(
    store: dist.Store,
    meeting: RendezvousConfig,
    backend: str,
    device: torch.device | None,
    timeout: timedelta | None,
    deadline: float,
) -> None:
    """All ranks are there: connect them, within what is left of ``init_timeout``, and set the final timeout."""
    # "gloo", "nccl", or one for each kind of device, as "cpu:gloo,cuda:nccl". Only groups of these two can be given
    # another timeout later: so only with these `init_timeout` counts for their connecting.
    names = backend.replace("cpu:", "").replace("cuda:", "").split(",")
    resettable = set(names) <= {"gloo", "nccl"}
    first_timeout = timeout
    if resettable:
        left_s = max(deadline - time.monotonic(), _LEAST_CONNECT_S)
        first_timeout = timedelta(seconds=left_s)
        if timeout is not None:
            first_timeout = min(first_timeout, timeout)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=first_timeout,
            device_id=device,
        )
    except (RuntimeError, dist.DistError) as error:
        reason, _, _ = str(error).partition("\n")
        raise StartError(
            f"All {meeting.world_size} ranks came, but {backend} could not connect rank {meeting.rank} (host "
            f"{socket.gethostname()}) to the others: {reason} The interfaces here are {describe_interfaces()}; name "
            "the one that reaches the other nodes in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME)."
        ) from None
    if timeout is not None:
        store.set_timeout(timeout)
        if resettable:
            set_group_timeout(backend_timeout(timeout, "nccl" in backend))


# ---- the store ----


def _open_store(
    meeting: RendezvousConfig,
    card: RankInfo,
    deadline: float,
    limit: timedelta,
) -> tuple[dist.Store, str]:
    """A connection to the job's store, which rank 0 serves unless an agent does; and what is listened on."""
    listener: socket.socket | None = None
    if meeting.rank == 0 and not _agent_serves():
        listener = _listen(meeting, card, deadline)
    if listener is None:
        return _connect(meeting, deadline, limit), ""
    host, port = listener.getsockname()[:2]
    own_address = host
    if ipaddress.ip_address(host).is_unspecified:
        own_address = "127.0.0.1"
        log.warning("MASTER_ADDR=%s is no address of this machine that other nodes can reach. The job's store listens "
                    "on all interfaces, port %d.", meeting.address, port)  # fmt: skip
    store = dist.TCPStore(
        own_address,
        port,
        is_master=True,
        timeout=limit,
        master_listen_fd=listener.detach(),
        wait_for_workers=False,
    )
    return store, f"{host} port {port}"


def _listen(meeting: RendezvousConfig, card: RankInfo, deadline: float) -> socket.socket | None:
    """A socket on the one address that MASTER_ADDR means here; on all where that is none of this machine's.

    None if this very process listens there already.
    """
    # The name may mean several addresses: the first one that is this machine's.
    for family, address in _resolve(meeting, deadline):
        if meeting.spans_nodes and ipaddress.ip_address(address[0]).is_loopback:
            continue  # a host name that means 127.0.1.1 on its own machine
        try:
            return _bound(family, address)
        except OSError as error:
            if error.errno == EADDRINUSE:
                _require_own(meeting, card)
                return None
            if error.errno != EADDRNOTAVAIL:  # else: not an address of this machine, so try the next one
                raise StartError(
                    f"Rank 0 cannot listen on {address[0]} port {meeting.port}: {error.strerror}."
                ) from None
    # None is this machine's. Maybe another rank 0 serves at that address already. Else the other nodes reach this
    # machine by an address that it does not know of, and the store has to listen everywhere.
    if not _is_own(meeting.port) and _tell_the_first(meeting, card):
        raise StartError(
            f"{card} cannot serve the job's store: another process does so at MASTER_ADDR={meeting.address} port "
            f"{meeting.port}. Rank 0 was started twice, or another job has the same address and port. Give every "
            "process a rank of its own (NODE_RANK, RANK), and every job a port (MASTER_PORT)."
        )
    try:
        return _bound(socket.AF_INET, ("", meeting.port))
    except OSError as error:
        if error.errno == EADDRINUSE:
            _require_own(meeting, card)
            return None
        raise StartError(f"Rank 0 cannot listen on port {meeting.port}: {error.strerror}.") from None


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not held up by connections of a run before
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _is_own(port: int) -> bool:
    holder = holder_of(port)
    if holder is None:
        return False
    process, _ = holder
    return process == os.getpid()


def _require_own(meeting: RendezvousConfig, card: RankInfo) -> None:
    """Someone listens on the port: raise :class:`StartError` unless it is this process, for an earlier group."""
    if _is_own(meeting.port):
        return
    holder = holder_of(meeting.port)
    _tell_the_first(meeting, card)
    who = "a process of another user"
    if holder is not None:
        process, command = holder
        who = f"process {process} ({command})"
    raise StartError(
        f"Rank 0 (host {socket.gethostname()}, pid {os.getpid()}) cannot serve the job's store at {meeting.address} "
        f"port {meeting.port}: {who} listens there (EADDRINUSE). Another job has the same MASTER_PORT, or rank 0 was "
        "started twice. End that process, or set MASTER_PORT to a free port on all ranks."
    )


def _tell_the_first(meeting: RendezvousConfig, card: RankInfo) -> bool:
    """Leave ``card`` in the store that another process serves in the place of this one's; whether there is one.

    If it waits for its ranks there, as another rank 0 does, all of them hear at once that there are two.
    """
    with suppress(RuntimeError, dist.DistError, StartError):  # there is none
        store = _connect(meeting, time.monotonic(), timedelta(seconds=_PROBE_S))
        others = dist.PrefixStore(_run_key(), store)
        leave(others, card)
        return True
    return False


def _resolve(meeting: RendezvousConfig, deadline: float) -> list[tuple[int, tuple[Any, ...]]]:
    """What MASTER_ADDR means: (address family, socket address), in the resolver's order."""
    give_up = min(deadline, time.monotonic() + _NAME_PATIENCE_S)
    while True:
        try:
            found = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)
            return [(family, address) for family, _, _, _, address in found]
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() + _PAUSE_S > give_up:
                reason = getattr(error, "strerror", None) or str(error)
                raise StartError(
                    f"MASTER_ADDR={meeting.address} cannot be resolved on host {socket.gethostname()}: {reason}. Set "
                    "it to a name or an address of rank 0's machine that all nodes know."
                ) from None
        time.sleep(_PAUSE_S)


def _connect(meeting: RendezvousConfig, deadline: float, limit: timedelta) -> dist.Store:
    """A client of the store. Raises :class:`StartError` if none answers until the deadline."""
    host = _reachable(meeting, deadline, limit)
    stores: list[dist.Store] = []

    def connect() -> None:
        with suppress(RuntimeError, dist.DistError):  # it is said below that there is no store
            store = dist.TCPStore(
                host,
                meeting.port,
                is_master=False,
                timeout=limit,
                wait_for_workers=False,
            )
            stores.append(store)

    # In a thread, as a server that accepts and then says nothing would hold torch's client for ever.
    thread = threading.Thread(target=connect, name="lightning_smddp_connect", daemon=True)
    thread.start()
    left_s = max(deadline - time.monotonic(), _LEAST_ANSWER_S)
    thread.join(left_s)
    if not stores:
        raise StartError(
            f"What answers at MASTER_ADDR={meeting.address} port {meeting.port} is not this job's store, says rank "
            f"{meeting.rank} (host {socket.gethostname()}). Another program listens there: set MASTER_PORT to a free "
            "port on all ranks."
        )
    return stores[0]


def _reachable(meeting: RendezvousConfig, deadline: float, limit: timedelta) -> str:
    """The address under which someone accepts connections; waits for rank 0 to do so."""
    reason = "nobody listens there"
    while True:
        for _, address in _resolve(meeting, deadline):
            left = max(deadline - time.monotonic(), _PAUSE_S)
            try:
                connection = socket.create_connection(address[:2], timeout=left)
                connection.close()
            except OSError as error:
                reason = error.strerror or "no answer"
            else:
                return str(address[0])
        if time.monotonic() > deadline:
            raise StartError(
                f"Rank 0 is missing: after init_timeout={limit.total_seconds():g} s rank {meeting.rank} (host "
                f"{socket.gethostname()}) cannot reach the job's store at MASTER_ADDR={meeting.address} port "
                f"{meeting.port} ({reason}). Look at rank 0's own output; if it runs, MASTER_ADDR has to be an address "
                "of its machine, with that port open to this one."
            )
        time.sleep(_PAUSE_S)


def _tell_and_raise(meeting: RendezvousConfig, card: RankInfo) -> None:
    """This rank cannot take part: say so in the store, if there is one soon, and raise."""
    soon = timedelta(seconds=_TELL_PATIENCE_S)
    deadline = time.monotonic() + _TELL_PATIENCE_S
    with suppress(RuntimeError, dist.DistError, StartError):  # then the others learn that this rank is missing
        store, served = _open_store(meeting, card, deadline, soon)
        meet(
            dist.PrefixStore(_run_key(), store),
            card,
            deadline,
            _TELL_PATIENCE_S,
            serves=bool(served),
        )
    raise StartError(f"{card} cannot start: {card.problem}")


def _store_ended(meeting: RendezvousConfig) -> str:
    return (
        f"The job's store at {meeting.address} port {meeting.port} ended while rank {meeting.rank} (host "
        f"{socket.gethostname()}) waited for the others: look at rank 0's own output."
    )
