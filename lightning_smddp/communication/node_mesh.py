"""Unix sockets between the ranks of one node: a barrier of some 20 us that carries a message and a file descriptor.

The backend's own barrier costs 0.15 to 3 ms on gloo, the more the busier the machine is. A process-shared pthread
barrier is as fast as this one but has no timeout, and a peer that dies leaves the others in it for ever. A socket
reports the peer's end by itself, waits with a timeout, passes descriptors of shared memory (SCM_RIGHTS), and leaves
nothing in any file system: the sockets live in Linux's abstract namespace, under random names, and processes of other
users are turned away.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_smddp.communication.objects import RankFailedError, RankTimeoutError, each
from lightning_smddp.communication.topology import Topology

OnWait = Callable[[float], None]
"""Takes the seconds that this rank waited inside its node."""

_MESSAGE_BYTES = 1024  # the longest message
_LEAST_TIMEOUT_S = 1e-3  # a timeout of 0 would not wait at all, and one below it is an error
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


@dataclass(frozen=True)
class Arrival:
    """One exchange: messages and descriptors by local rank, and how long we waited."""

    messages: dict[int, bytes]
    descriptors: dict[int, int]
    waited_s: float

    def close_descriptors(self) -> None:
        """Close all that came."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)


class NodeMesh:
    """A socket to every other rank of the node.

    An object belongs to one thread: exchanges are matched by their order.

    Args:
        topology: who is on this node.
        timeout: how long :meth:`exchange` waits for a peer.
    """

    def __init__(self, topology: Topology, timeout: timedelta) -> None:
        self.topology = topology
        self.rank = topology.local_rank
        self.size = len(topology.local_ranks)
        self.name = topology.describe(topology.rank)
        self._timeout_s = timeout.total_seconds()
        self._sockets: dict[int, socket.socket] = {}  # by local rank
        _open.add(self)

    @classmethod
    def connect(cls, topology: Topology, group: dist.ProcessGroup, timeout: timedelta) -> NodeMesh:
        """A mesh of the ranks of this node. Collective over ``group``.

        Raises:
            OSError: on every rank of ``group``, if one of them could not reach the others of its node.
        """
        mesh = cls(topology, timeout)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                # Each rank listens before it tells its address, so nobody calls in vain.
                addresses = each(lambda: _listen(listener, topology.world_size), group)
                each(lambda: mesh._call(listener, addresses), group)
            except Exception:
                mesh.close()
                raise
        return mesh

    def exchange(self, message: bytes = b"\0", descriptor: int | None = None) -> Arrival:
        """Send ``message`` (and optionally a descriptor) to all local ranks and receive theirs: a barrier.

        The caller owns the received descriptors.

        Raises:
            RankFailedError: a peer's process or its connection ended.
            RankTimeoutError: a peer did not come within the timeout.
        """
        self.begin(message, descriptor)
        return self.finish()

    def begin(self, message: bytes = b"\0", descriptor: int | None = None) -> None:
        """The first half of :meth:`exchange`: tell the peers, and wait for nobody.

        Each call is followed by one of :meth:`finish`; several calls may come first, as the order tells which is which.

        Raises:
            RankFailedError: a peer's connection ended.
        """
        for peer, connection in self._sockets.items():
            try:
                if descriptor is None:
                    connection.send(message)
                else:
                    socket.send_fds(connection, [message], [descriptor])
            except OSError as error:
                raise self._failed(peer, str(error)) from error

    def finish(self) -> Arrival:
        """The second half of :meth:`exchange`: wait for what the peers said in the oldest one that is not finished."""
        start = time.perf_counter()
        deadline = start + self._timeout_s
        messages: dict[int, bytes] = {}
        descriptors: dict[int, int] = {}
        # A socket of type SEQPACKET keeps messages apart and in order, so the oldest one of each peer is of this
        # exchange, also where some peers are further on already.
        for peer, connection in self._sockets.items():
            messages[peer], received = self._receive(peer, connection, deadline)
            if received is not None:
                descriptors[peer] = received
        return Arrival(messages, descriptors, time.perf_counter() - start)

    def describe(self, local_rank: int) -> str:
        """``rank 3 (host b, local rank 1)``, for messages."""
        return self.topology.describe(self.topology.local_ranks[local_rank])

    def close(self) -> None:
        """Close all sockets; peers that wait for this rank get a :class:`RankFailedError`."""
        for connection in self._sockets.values():
            connection.close()
        self._sockets = {}

    def _call(self, listener: socket.socket, addresses: list[bytes]) -> None:
        """Connect to the lower local ranks, accept the higher ones."""
        topology, sockets = self.topology, self._sockets
        # Of each pair the higher rank calls and the lower one accepts. A call ends as soon as it is in the listener's
        # queue, which has room for all of them: so nobody has to accept in time, and no two ranks wait for each other.
        for peer in range(self.rank):
            connection = sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(self._timeout_s)
            connection.connect(addresses[topology.local_ranks[peer]])
            connection.send(bytes([self.rank]))
        deadline = time.perf_counter() + self._timeout_s
        while len(sockets) < self.size - 1:
            remaining = max(deadline - time.perf_counter(), _LEAST_TIMEOUT_S)
            listener.settimeout(remaining)
            connection, _ = listener.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _pid, uid, _gid = _CREDENTIALS.unpack(credentials)
            if uid != os.getuid():  # some other program on this host
                connection.close()
                continue
            connection.settimeout(remaining)
            greeting = connection.recv(_MESSAGE_BYTES)  # the caller's local rank
            if len(greeting) != 1:
                raise OSError("a process ended while it connected")
            sockets[greeting[0]] = connection
        self._sockets = dict(sorted(sockets.items()))

    def _receive(self, peer: int, connection: socket.socket, deadline: float) -> tuple[bytes, int | None]:
        remaining = deadline - time.perf_counter()
        connection.settimeout(max(remaining, _LEAST_TIMEOUT_S))
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        except TimeoutError:
            text = (
                f"{self.describe(peer)} did not come to the gradient exchange within {self._timeout_s:g} s. It hangs, "
                "is much slower than the other ranks, or runs a different number of batches. "
                "Raise `collective_timeout` if such a delay is expected."
            )
            raise RankTimeoutError(self.topology.local_ranks[peer], text) from None
        except OSError as error:
            raise self._failed(peer, str(error)) from error
        if not message:
            raise self._failed(peer, "it closed its connection")
        return message, descriptors[0] if descriptors else None

    def _failed(self, peer: int, cause: str) -> RankFailedError:
        message = f"{self.describe(peer)} is gone ({cause}) while {self.name} waited."
        return RankFailedError(self.topology.local_ranks[peer], message)


_open: weakref.WeakSet[NodeMesh] = weakref.WeakSet()


def _close_all() -> None:
    """In a forked process, such as a DataLoader's worker: a socket that it held would hide the end of its rank."""
    for mesh in list(_open):
        mesh.close()


os.register_at_fork(after_in_child=_close_all)


def _listen(listener: socket.socket, calls: int) -> bytes:
    """Returns the address, which is new."""
    listener.bind(f"\0lightning_smddp-{secrets.token_hex(16)}")
    listener.listen(calls)
    address: bytes = listener.getsockname()
    return address
