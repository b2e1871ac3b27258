"""The hub: the watching thread of rank 0, to which all ranks are connected. It decides what was the first failure."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lightning_smddp.supervision.acceptor import Acceptor
from lightning_smddp.supervision.connection import MAX_LINE_BYTES, Connection, Message
from lightning_smddp.supervision.epochs import EpochEnds
from lightning_smddp.supervision.failure import Failure, Kind, failure_of
from lightning_smddp.supervision.hangs import HangRule
from lightning_smddp.supervision.loop import Loop, Timer
from lightning_smddp.supervision.peer import OomWatch, Peer
from lightning_smddp.supervision.processes import Process
from lightning_smddp.supervision.progress import Reading, RemoteProgress
from lightning_smddp.supervision.stop import StopVote

_LATE_BEATS = 3.0  # so many periods without a heartbeat are more than an accident
_ANSWER_WITHIN_S = 0.75  # less than ranks wait to hear whose fault a timeout is


class _Doubt(NamedTuple):
    """A silent rank, while the others of its host are asked whether they are there."""

    silent: Peer
    company: list[Peer]
    waiter: str  # who has waited for it, if it is not the limit that is over
    if_heard: Callable[[], object]
    deadline: Timer


class Hub:
    """Belongs to the loop's thread.

    Args:
        loop: of rank 0's watching thread.
        own: rank 0 itself.
        world_size: number of ranks.
        period: seconds between heartbeats.
        limit: seconds of silence after which a rank has failed.
        tell_own: hands a message to rank 0's own client.
        oom: what the kernel killed.
        agree_within_s: how long ranks have to answer where they can stop.
    """

    def __init__(
        self,
        loop: Loop,
        own: Peer,
        world_size: int,
        period: float,
        limit: float,
        tell_own: Callable[[Message], None],
        oom: OomWatch,
        agree_within_s: float,
    ) -> None:
        self._loop, self._own, self._world_size = loop, own, world_size
        self._period, self._limit, self._tell_own, self._oom = period, limit, tell_own, oom
        self.peers: dict[int, Peer] = {own.rank: own}
        self.failure: Failure | None = None
        self.secret = secrets.token_hex(16)
        self.started = False
        self._acceptor: Acceptor | None = None
        self._doubt: _Doubt | None = None
        self._hangs = HangRule(limit)
        self._stops = StopVote(loop, self._all, self._tell_all, agree_within_s)
        self._epochs = EpochEnds(self._all, self._tell_all, self.declare)

    # ---- start ----

    def open(self, listener: socket.socket | None, within_s: float) -> None:
        """Let the other ranks in; those that have not come in time are the first failure."""
        if listener is not None:
            self._acceptor = Acceptor(self._loop, listener, self.secret, self._admit)
            self._loop.later(within_s, self._check_all_came, within_s)
        self._start_if_complete()

    def _admit(self, message: Message, connection: Connection) -> str | None:
        rank, host = int(message["rank"]), str(message["host"])[:200]
        if message["world_size"] != self._world_size or not 0 < rank < self._world_size:
            return f"it is rank {rank} of {message['world_size']}, this job has {self._world_size} ranks"
        if rank in self.peers:
            return f"rank {rank} is here already (host {self.peers[rank].host}), this one is on host {host}"
        process = Process.from_json(message["process"])
        progress = RemoteProgress(process.pid if process.is_here else None, int(message["descriptor"]))
        peer = Peer(rank, host, process, progress, connection)
        connection.max_line = MAX_LINE_BYTES
        connection.on_message = lambda received: self.receive(peer, received)
        connection.on_end = lambda reason: self._ended(peer, reason)
        self.peers[rank] = peer
        peer.watch_process(self._loop, self._ended)
        self._start_if_complete()
        return None

    def _start_if_complete(self) -> None:
        if len(self.peers) < self._world_size or self.failure is not None:
            return
        self.started = True
        if self._acceptor is not None:
            self._acceptor.close()
        own = self._own
        self._tell_all(
            {
                "type": "welcome",
                "host": own.host,
                "process": own.process.to_json(),
                "descriptor": getattr(own.progress, "descriptor", -1),
                "ranks": [
                    [peer.rank, peer.process.to_json(), getattr(peer.progress, "descriptor", -1)]
                    for peer in self.peers.values()
                ],
            }
        )

    def _check_all_came(self, within_s: float) -> None:
        if self.started or self.failure is not None:
            return
        missing = [rank for rank in range(self._world_size) if rank not in self.peers]
        names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        text = f"of {self._world_size} ranks, these did not start within {within_s:g} s: {names}"
        self.declare(failure_of(missing[0], "unknown", 0, Reading(), "timeout", text))

    # ---- messages of the ranks ----

    def receive(self, peer: Peer, message: Message) -> None:
        """A message of ``peer``; raises ``ValueError``, ``KeyError`` or ``TypeError`` if it is none."""
        self._heard(peer)
        kind = message["type"]
        if kind == "beat":
            if isinstance(peer.progress, RemoteProgress):
                peer.progress.told = Reading.from_json(message["progress"])
        elif kind == "failure":
            self._reported(Failure.from_json(message["failure"]), bool(message["of_communication"]))
        elif kind == "timeout":
            self._timed_out(peer, str(message["message"]))
        elif kind == "stop":
            self._stops.request(int(message["signum"]))
        elif kind == "ready":
            self._stops.answer(peer.rank, int(message["step"]))
        elif kind == "epoch":
            self._epochs.came(peer.rank, int(message["epoch"]), int(message["batches"]), bool(message["validates"]))
        elif kind == "bye":
            self._left(peer)
        elif kind == "ended":
            self._told_ended(peer, int(message["rank"]), str(message["how"])[:200], message["progress"])
        elif kind == "ack":
            peer.acknowledged = True
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _left(self, peer: Peer) -> None:
        peer.has_left = True
        if peer is not self._own:
            self._tell(peer, {"type": "bye"})
        self._stops.look()
        self._epochs.look()
        if all(peer.has_left for peer in self.peers.values()):  # who has ended without a word is a failure
            self._tell_own({"type": "bye"})

    # ---- failures ----

    def _reported(self, failure: Failure, of_communication: bool) -> None:
        # A collective breaks if another rank has left the run early. Then that one is the cause, not who reports.
        gone = next((m for m in self.peers.values() if m.has_left and m.rank != failure.rank), None)
        if of_communication and gone is not None:
            text = f"it ended its run while rank {failure.rank} was in the middle of its own: {failure.message}"
            failure = gone.failure("left", text)
        self.declare(failure)

    def _timed_out(self, peer: Peer, text: str) -> None:
        found = self._late(peer)
        if found is None:
            everyone = "all ranks say that they are at the same point"
            self.declare(peer.failure("timeout", f"{text}; no rank is behind: {everyone}"))
            return
        late, kind = found
        at = peer.progress.read()
        waiter = f"{peer.name} waited for it at step {at.step}{f' ({at.phase})' if at.phase else ''}: {text}"
        if kind == "silent":
            self._find_silent(late, f"; {waiter}", lambda: self._timed_out(peer, text))
        else:
            self.declare(late.failure(kind, waiter))

    def _late(self, asking: Peer) -> tuple[Peer, Kind] | None:
        """Who is waited for: the one that is silent, else behind in steps, else in another phase than the rest."""
        peers = [peer for peer in self.peers.values() if peer.is_in_run]
        silent = max(peers, key=lambda peer: peer.silence_s)
        if silent.silence_s > _LATE_BEATS * self._period:
            return silent, "silent"
        readings = {peer.rank: peer.progress.read() for peer in peers}
        steps = [reading.step for reading in readings.values()]
        if min(steps) < max(steps):
            return next(m for m in peers if readings[m.rank].step == min(steps)), "timeout"
        phases = Counter(reading.phase for reading in readings.values())
        usual = max(phases, key=lambda phase: (phases[phase], phase == readings[asking.rank].phase))
        odd = next((m for m in peers if readings[m.rank].phase != usual), None)
        if odd is None and len(peers) == 2:  # the other one has waited in vain
            odd = next(m for m in peers if m is not asking)
        return None if odd is None else (odd, "timeout")

    def _ended(self, peer: Peer, how: str) -> None:
        if peer.is_in_run:
            peer.has_ended = True
            if self.failure is not None and self.failure.rank == peer.rank:
                self._tell_all({"type": "over"})
            peer.settle(
                self._loop,
                self._oom,
                how,
                lambda text: self.declare(peer.failure("died", self._ended_text(peer, text))),
            )

    def _told_ended(self, by: Peer, rank: int, how: str, progress: list[Any]) -> None:
        """``by`` saw the end of another rank of its host, which is not this one."""
        peer = self.peers[rank]
        if peer.process.namespace != by.process.namespace:
            raise ValueError(f"rank {by.rank} cannot know how rank {rank} ended")
        if isinstance(peer.progress, RemoteProgress):
            peer.progress.told = Reading.from_json(progress)
        peer.account = how
        self._ended(peer, how)

    def _ended_text(self, peer: Peer, text: str) -> str:
        """``text``, and whether a whole host has gone."""
        company = self._company(peer)
        if company and all(other.has_ended for other in company):
            text += f", and so did all {len(company) + 1} ranks of host {peer.host}"
        return text

    def _find_silent(self, silent: Peer, waiter: str, if_heard: Callable[[], object]) -> None:
        """Declare that ``silent`` is, after finding out whether its host is, too: heartbeats of now are asked for.

        When the last ones came says little: they are seldom, and a busy machine sends them late. ``if_heard()`` is
        called if word of ``silent`` comes meanwhile.
        """
        if self._doubt is not None or self.failure is not None:
            return
        company = [other for other in self._company(silent) if other.is_in_run]
        if silent.process.is_here or not company:
            self._declare_silent(silent, None, waiter)
            return
        deadline = self._loop.later(_ANSWER_WITHIN_S, self._settle_doubt, False)
        self._doubt = _Doubt(silent, company, waiter, if_heard, deadline)
        for other in company:
            other.send({"type": "ping"}, droppable=True)

    def _heard(self, peer: Peer) -> None:
        peer.silence_s = 0.0
        doubt = self._doubt
        if doubt is None:
            return
        if peer in doubt.company:
            self._settle_doubt(True)
        elif peer is doubt.silent:
            self._doubt = None
            doubt.deadline.cancel()
            self._loop.call(doubt.if_heard)  # after what this word says

    def _settle_doubt(self, company_is_heard: bool) -> None:
        doubt, self._doubt = self._doubt, None
        assert doubt is not None
        doubt.deadline.cancel()
        self._declare_silent(doubt.silent, company_is_heard, doubt.waiter)

    def _declare_silent(self, silent: Peer, company_is_heard: bool | None, waiter: str) -> None:
        self.declare(silent.failure("silent", silent.silence(company_is_heard) + waiter), silent.process)

    def _company(self, peer: Peer) -> list[Peer]:
        """The other ranks of its host."""
        return [other for other in self.peers.values() if other.host == peer.host and other is not peer]

    def declare(self, failure: Failure, kill: Process | None = None) -> None:
        """The first one is what everybody hears of; later ones are its consequences, or nobody's concern."""
        if self.failure is not None:
            return
        self.failure = failure
        process = None if kill is None else kill.to_json()
        self._tell_all({"type": "failure", "failure": failure.to_json(), "kill": process})

    @property
    def unaware(self) -> bool:
        """Whether some rank that is still there has not confirmed the failure."""
        return any(m.is_in_run and not m.acknowledged for m in list(self.peers.values()))

    @property
    def others_are_there(self) -> bool:
        """Whether the run of some other rank is not over yet."""
        return any(peer.is_in_run for peer in list(self.peers.values()) if peer is not self._own)

    # ---- time ----

    def tick(self, seconds: float) -> None:
        """A period has gone by, of which this thread was there to see ``seconds``."""
        for peer in list(self.peers.values()):
            if peer is self._own or not peer.is_in_run:
                continue
            peer.silence_s += seconds
            peer.send({"type": "beat", "progress": self._own.progress.read().to_json()}, droppable=True)
            if peer.silence_s > self._limit:
                self._find_silent(peer, "", lambda: None)
        self._epochs.look()
        if self.started and self.failure is None:
            found = self._hangs.tick(self.peers.values(), seconds)
            if found is not None:
                late, at, text = found
                self.declare(failure_of(late.rank, late.host, late.process.pid, at, "timeout", text))

    def say_bye(self) -> None:
        """To the ranks that are still there: they go on without a hub."""
        for peer in self.peers.values():
            if peer.is_in_run and peer is not self._own:
                peer.send({"type": "bye"})

    def _all(self) -> Iterable[Peer]:
        return self.peers.values()

    def _tell(self, peer: Peer, message: Message) -> None:
        if peer is self._own:
            self._tell_own(message)
        else:
            peer.send(message)

    def _tell_all(self, message: Message) -> None:
        for peer in list(self.peers.values()):
            if not peer.has_ended:
                self._tell(peer, message)

    def close(self) -> None:
        """Close the door for new peers and the connections of those that are known."""
        if self._acceptor is not None:
            self._acceptor.close()
        for peer in self.peers.values():
            peer.close()

    def abandon(self) -> None:
        """The same in a forked child."""
        if self._acceptor is not None:
            self._acceptor.abandon()
        for peer in self.peers.values():
            peer.abandon()
