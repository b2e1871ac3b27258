"""Sockets between the ranks of a node: messages, descriptors, and what happens when a peer fails."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_smddp.communication import node_mesh
from lightning_smddp.communication.node_mesh import NodeMesh
from lightning_smddp.communication.objects import RankFailedError, RankTimeoutError, gather
from lightning_smddp.communication.topology import Topology
from tests.communication.errors import message_of
from tests.ranks import RanksFailedError, run_in_threads, run_ranks

PATIENCE = timedelta(seconds=20)


def connect(group: dist.ProcessGroup, timeout: timedelta = PATIENCE) -> NodeMesh:
    topology = Topology.from_identities(["host"] * group.size(), group.rank())
    return NodeMesh.connect(topology, group, timeout)


# ---- messages ----


def exchange_messages(group: dist.ProcessGroup) -> list[dict[int, bytes]]:
    meshes = [connect(group) for _ in range(2)]
    try:
        return [mesh.exchange(f"{index}:{group.rank()}".encode()).messages for index, mesh in enumerate(meshes)]
    finally:
        for mesh in meshes:
            mesh.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_receives_every_others_message_on_each_mesh(size: int) -> None:
    for rank, received in enumerate(run_in_threads(exchange_messages, size)):
        others = [peer for peer in range(size) if peer != rank]
        assert received == [{peer: f"{index}:{peer}".encode() for peer in others} for index in range(2)]


# ---- failures ----


def die() -> None:
    mesh = connect(dist.group.WORLD)
    mesh.exchange()
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(30)  # a DataLoader worker that holds the dead rank's sockets open
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        mesh.exchange()
    assert not isinstance(caught.value, RankTimeoutError)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 3
    raise caught.value


@pytest.mark.slow
def test_a_killed_peer_whose_child_holds_the_sockets_is_named_within_seconds() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(die, 2)
    assert "SIGKILL" in caught.value.tracebacks[1]
    assert "rank 1 (host host, local rank 1) is gone" in caught.value.tracebacks[0]
    assert "while rank 0 (host host, local rank 0) waited." in caught.value.tracebacks[0]


def stay_away(group: dist.ProcessGroup, done: threading.Event) -> tuple[float, str]:
    mesh = connect(group, timedelta(seconds=0.3))
    start = time.monotonic()
    message = ""
    if group.rank() == 0:
        message = message_of(RankTimeoutError, mesh.exchange)
        done.set()
    done.wait(20)
    mesh.close()
    return time.monotonic() - start, message


def test_a_peer_that_does_not_come_is_named_after_the_timeout() -> None:
    (waited, message), _ = run_in_threads(stay_away, 2, threading.Event())
    assert 0.25 < waited < 2
    assert message.startswith("rank 1 (host host, local rank 1) did not come to the gradient exchange within 0.3 s.")
    assert "collective_timeout" in message


# ---- strangers ----


def connect_beside(group: dist.ProcessGroup) -> dict[int, bytes]:
    topology = Topology.from_identities(["host"] * group.size(), group.rank())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen(3)
    addresses = gather(listener.getsockname(), group)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if group.rank() == 0:
        stranger.connect(listener.getsockname())  # before any rank
    dist.barrier(group=group)
    mesh = NodeMesh(topology, PATIENCE)
    mesh._call(listener, addresses)
    received = mesh.exchange(str(group.rank()).encode()).messages
    for each in (mesh, listener, stranger):
        each.close()
    return received


def test_another_users_process_on_the_listener_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    users = iter([os.getuid() + 1])  # the first to connect looks like another user's
    monkeypatch.setattr(node_mesh.os, "getuid", lambda getuid=os.getuid: next(users, getuid()))
    assert run_in_threads(connect_beside, 2) == [{1: b"1"}, {0: b"0"}]
