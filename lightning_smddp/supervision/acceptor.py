"""Where the hub lets the other ranks in: a listening socket on one address, open until all have come."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Callable

from lightning_smddp.supervision.connection import Connection, Message
from lightning_smddp.supervision.loop import Loop

_PROOF_WITHIN_S = 5.0  # that it knows the secret
_MAX_PENDING = 64  # connections without a proof at a time
_MAX_GREETING_BYTES = 4096
_RETRY_S = 0.1
_log = logging.getLogger(__name__)


class Acceptor:
    """Accepts connections on ``listener`` and calls ``admit(message, connection)`` for those with the secret.

    ``admit`` returns None, or why it refuses. Everyone else is dropped, with one line in the log for each.
    """

    def __init__(
        self, loop: Loop, listener: socket.socket, secret: str, admit: Callable[[Message, Connection], str | None]
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._secret = secret
        self._admit = admit
        self._pending: set[Connection] = set()
        self._closed = False
        listener.setblocking(False)
        loop.watch(listener.fileno(), self._accept)

    def close(self) -> None:
        """Close the listener, and connections that have not said who they are: nobody comes in any more."""
        if self._closed:
            return
        self._closed = True
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        for connection in self._pending:
            connection.close()
        self._pending.clear()

    def abandon(self) -> None:
        """In a forked child: let go of the sockets."""
        self._listener.close()
        for connection in self._pending:
            connection.abandon()

    def _accept(self) -> None:
        try:
            peer, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor left, say: trying again at once would only burn the processor
            _log.warning("A connection to the supervisor was not accepted: %s", error)
            self._loop.unwatch(self._listener.fileno())
            self._loop.later(1.0, self._resume)
            return
        if len(self._pending) >= _MAX_PENDING:
            peer.close()
            return
        # Whoever can reach this port may connect. Until it has shown the secret it may send one short line, and soon.
        who = f"{address[0]} port {address[1]}"
        connection = Connection(self._loop, peer, _refuse_all, _ignore, _MAX_GREETING_BYTES)
        connection.on_message = lambda message: self._greeted(message, connection, who)
        connection.on_end = lambda reason: self._drop(connection, who, reason)
        self._pending.add(connection)
        too_late = f"no greeting within {_PROOF_WITHIN_S:g} s"
        self._loop.later(_PROOF_WITHIN_S, self._drop, connection, who, too_late)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.watch(self._listener.fileno(), self._accept)

    def _greeted(self, message: Message, connection: Connection, who: str) -> None:
        # Compared in constant time, which does not tell how much of a guess is right.
        proof = str(message["secret"])
        if not secrets.compare_digest(proof.encode(), self._secret.encode()):
            self._drop(connection, who, "wrong secret")
            return
        self._pending.discard(connection)  # first, as admitting the last one closes the acceptor
        reason = self._admit(message, connection)
        if reason is not None:
            connection.send({"type": "refused", "reason": reason})
            self._pending.add(connection)
            self._drop(connection, who, reason)

    def _drop(self, connection: Connection, who: str, reason: str) -> None:
        if connection not in self._pending:  # admitted, or dropped before
            return
        self._pending.discard(connection)
        connection.close()
        _log.warning("The supervisor of this job dropped a connection from %s: %s.", who, reason)


def _refuse_all(message: Message) -> None:
    raise ValueError("not introduced yet")


def _ignore(reason: str) -> None:
    return


def listen(address: str) -> socket.socket:
    """A listening socket on the interface that ``address`` (a name or a number) stands for, never on all of them.

    Where the name means another machine (a service in front of this one) or, as on Debian, this one's loopback, the
    interface of the default route is taken. Raises ``ValueError`` when that cannot be done either.
    """
    reasons = []
    for numeric in (*_numbers_of(address), _default_route()):
        # 0.0.0.0 and :: are all interfaces, also those by which no rank comes.
        if numeric is None or ipaddress.ip_address(numeric).is_unspecified:
            continue
        family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((numeric, 0))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            reasons.append(f"{numeric}: {error.strerror}")
            continue
        return listener
    why = "; ".join(reasons) or "unknown"
    raise ValueError(
        f"The supervisor cannot listen on the address {address!r} of rank 0 ({why}). "
        "Set MASTER_ADDR to an address of the host of rank 0."
    )


def _numbers_of(address: str) -> list[str]:
    """What ``address`` resolves to; a name's loopback addresses only if the name is ``localhost``."""
    try:
        answers = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    found = []
    for *_, place in answers:
        number, _, _ = str(place[0]).partition("%")  # an IPv6 address may name its interface behind that
        if number not in found:
            found.append(number)
    if address == "localhost" or address in found:
        return found
    return [number for number in found if not ipaddress.ip_address(number).is_loopback]


def _default_route() -> str | None:
    """This host's address on the way to elsewhere; no packet is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # of RFC 5737, which nobody has
        return str(probe.getsockname()[0])
    return None


def connect(addresses: list[str], port: int, deadline: float) -> socket.socket:
    """The first of ``addresses`` that answers before ``time.monotonic()`` is ``deadline``; else its ``OSError``."""
    while True:
        for address in addresses:
            try:
                left_s = deadline - time.monotonic()
                timeout = max(0.1, min(5.0, left_s))
                return socket.create_connection((address, port), timeout=timeout)
            except OSError as error:
                problem = error
        if time.monotonic() > deadline:
            raise problem
        time.sleep(_RETRY_S)
