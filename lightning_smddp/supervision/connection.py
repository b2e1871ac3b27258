"""JSON, one object a line, over a non-blocking socket: what ranks tell each other while they are watched."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

from lightning_smddp.supervision.loop import Loop

Message = dict[str, Any]
MAX_LINE_BYTES = 2**20
_MAX_UNSENT_BYTES = 2**20


class Connection:
    """One end of a connection; belongs to the loop's thread.

    Args:
        loop: waits for it.
        peer: the connected socket, owned by this object.
        on_message: called with each message.
        on_end: called once with the reason: the peer closed it, broke it, or sent what is no message. Not after
            :meth:`close`.
        max_line: longest message that is accepted, in bytes.
    """

    def __init__(
        self,
        loop: Loop,
        peer: socket.socket,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
        max_line: int = MAX_LINE_BYTES,
    ) -> None:
        self.on_message = on_message
        self.on_end = on_end
        self.max_line = max_line
        self._loop = loop
        self._peer = peer
        self._received = bytearray()
        self._unsent = bytearray()
        self.closed = self._awaits_room = False
        peer.setblocking(False)
        with contextlib.suppress(OSError):  # not a TCP socket
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(peer.fileno(), self.receive)

    def send(self, message: Message) -> None:
        """Send now, or as soon as the peer takes it; to a closed connection, nothing."""
        if self.closed:
            return
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            self._end("it takes no messages")
            return
        text = json.dumps(message, separators=(",", ":"))
        self._unsent += text.encode() + b"\n"
        self._flush()

    @property
    def is_clogged(self) -> bool:
        """Whether something waits for the peer to take it."""
        return bool(self._unsent)

    def receive(self) -> None:
        """Read until nothing is there, and handle each whole line; an end of the connection is noted, not raised."""
        while not self.closed:
            try:
                data = self._peer.recv(65536)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            if not data:
                self._end("it closed the connection")
                return
            self._received += data
            self._deliver()

    def close(self) -> None:
        """Close it; what the peer has not taken is lost."""
        if self.closed:
            return
        self.closed = True
        self._loop.unwatch(self._peer.fileno())
        self._peer.close()

    def abandon(self) -> None:
        """In a forked child: let go of the socket, which is the parent's."""
        self._peer.close()

    def _deliver(self) -> None:
        while not self.closed:
            line, found, rest = self._received.partition(b"\n")
            if not found:
                # `_received` is left as it is: the rest of this line is still to come.
                if len(line) > self.max_line:
                    self._end(f"it sent more than {self.max_line} bytes in a line")
                return
            self._received = rest
            try:
                message = json.loads(line)
                if not isinstance(message, dict) or len(line) > self.max_line:
                    raise ValueError("not an object, or too long")
                self.on_message(message)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self._end(f"it sent what is no message ({type(error).__name__})")

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._peer.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._loop.call(self._break, error.strerror or str(error))  # later: the sender is not prepared for it
            return
        # The selector is asked for room only as long as something is unsent: a free socket can always be written.
        if self.is_clogged != self._awaits_room:
            self._awaits_room = self.is_clogged
            writable = self._flush if self.is_clogged else None
            self._loop.watch(self._peer.fileno(), self.receive, writable)

    def _break(self, reason: str) -> None:
        self.receive()  # what the peer sent before its end counts
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self.on_end(reason)
