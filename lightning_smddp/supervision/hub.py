"""The hub: the watching thread of rank 0, to which all ranks are connected. It decides what was the first failure."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from lightning_smddp.supervision.acceptor import Acceptor
from lightning_smddp.supervision.connection import MAX_LINE_BYTES, Connection, Message
from lightning_smddp.supervision.epochs import EpochEnds
from lightning_smddp.supervision.failure import Failure, failure_of
from lightning_smddp.supervision.hangs import HangRule
from lightning_smddp.supervision.loop import Loop, Timer
from lightning_smddp.supervision.peer import Peer
from lightning_smddp.supervision.processes import Process
from lightning_smddp.supervision.progress import Reading, RemoteProgress
from lightning_smddp.supervision.stop import StopVote

_MOST_CHARACTERS = 200  # of a text that a rank sends, such as its host's name
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
        agree_within_s: float,
    ) -> None:
        self._loop = loop
        self._own = own
        self._world_size = world_size
        self._period = period
        self._limit = limit
        self._tell_own = tell_own
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
        """Make a peer of who knows the secret; returns why it is refused, None if it is not."""
        rank = int(message["rank"])
        host = str(message["host"])[:_MOST_CHARACTERS]
        if message["world_size"] != self._world_size or not 0 < rank < self._world_size:
            return f"it is rank {rank} of {message['world_size']}, this job has {self._world_size} ranks"
        if rank in self.peers:
            return f"rank {rank} is here already (host {self.peers[rank].host}), this one is on host {host}"
        process = Process.from_json(message["process"])
        pid = process.pid if process.is_here else None
        progress = RemoteProgress(pid, int(message["descriptor"]))
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
        # By this each rank can watch the process of another one of its host, and read its progress.
        ranks = []
        for peer in self.peers.values():
            ranks.append([peer.rank, peer.process.to_json(), peer.progress.descriptor])
        self._tell_all(
            {
                "type": "welcome",
                "host": self._own.host,
                "process": self._own.process.to_json(),
                "descriptor": self._own.progress.descriptor,
                "ranks": ranks,
            }
        )

    def _check_all_came(self, within_s: float) -> None:
        if self.started or self.failure is not None:
            return
        missing = [rank for rank in range(self._world_size) if rank not in self.peers]
        names = ", ".join(str(rank) for rank in missing[:20])
        if len(missing) > 20:
            names += ", ..."
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
            self._epochs.came(
                peer.rank,
                int(message["epoch"]),
                int(message["batches"]),
                bool(message["validates"]),
            )
        elif kind == "bye":
            self._left(peer)
        elif kind == "ended":
            how = str(message["how"])[:_MOST_CHARACTERS]
            self._told_ended(peer, int(message["rank"]), how, message["progress"])
        elif kind == "ack":
            peer.acknowledged = True
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _left(self, peer: Peer) -> None:
        # The others' goodbyes are answered at once, rank 0's own when all have said theirs: this thread is the hub, and
        # has to be there until then. Who has ended without a word is a failure, and keeps it waiting.
        peer.has_left = True
        if peer is not self._own:
            peer.send({"type": "bye"})
        self._stops.look()
        self._epochs.look()
        if all(other.has_left for other in self.peers.values()):
            self._tell_own({"type": "bye"})

    # ---- failures ----

    def _reported(self, failure: Failure, of_communication: bool) -> None:
        if of_communication:
            # A collective breaks if another rank has left the run early. Then that one is the cause, not who reports.
            for peer in self.peers.values():
                if peer.has_left and peer.rank != failure.rank:
                    text = f"it ended its run while rank {failure.rank} was in the middle of its own: {failure.message}"
                    failure = peer.failure("left", text)
                    break
        self.declare(failure)

    def _timed_out(self, peer: Peer, text: str) -> None:
        """``peer`` was the first whose collective has timed out: declare whose fault that is."""
        if not peer.is_in_run:  # it has ended while a silent one was asked for: how, is being found out
            return
        at = peer.progress.read()
        where = f"at step {at.step}"
        if at.phase:
            where += f" ({at.phase})"
        waiter = f"{peer.name} waited for it {where}: {text}"
        present = [other for other in self.peers.values() if other.is_in_run]
        most_silent = max(present, key=lambda other: other.silence_s)
        if most_silent.is_late(self._period):
            self._find_silent(most_silent, f"; {waiter}", lambda: self._timed_out(peer, text))
            return
        late = _late(present, peer)
        if late is not None:
            self.declare(late.failure("timeout", waiter))
            return
        everyone = "all ranks say that they are at the same point"
        self.declare(peer.failure("timeout", f"{text}; no rank is behind: {everyone}"))

    def _ended(self, peer: Peer, how: str) -> None:
        """The process of ``peer``, or its connection, has ended: find out how, and declare that, unless it has left."""
        if not peer.is_in_run:
            return
        peer.has_ended = True
        if self.failure is not None and self.failure.rank == peer.rank:
            self._tell_all({"type": "over"})  # others wait for that, as it may have run hooks of the user's

        def declare(text: str) -> None:
            self.declare(peer.failure("died", self._ended_text(peer, text)))

        peer.settle(self._loop, how, declare)

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
        # Word of the silent rank itself ends the doubt. Word of another rank of its host means that the network is not
        # cut, so that it is stopped.
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
        doubt = self._doubt
        self._doubt = None
        assert doubt is not None
        doubt.deadline.cancel()
        self._declare_silent(doubt.silent, company_is_heard, doubt.waiter)

    def _declare_silent(self, silent: Peer, company_is_heard: bool | None, waiter: str) -> None:
        text = silent.silence(company_is_heard) + waiter
        self.declare(silent.failure("silent", text), silent.process)

    def _company(self, peer: Peer) -> list[Peer]:
        """The other ranks of its host."""
        return [other for other in self.peers.values() if other.host == peer.host and other is not peer]

    def declare(self, failure: Failure, kill: Process | None = None) -> None:
        """The first one is what everybody hears of; later ones are its consequences, or nobody's concern."""
        if self.failure is not None:
            return
        self.failure = failure
        process = kill.to_json() if kill is not None else None
        self._tell_all(
            {
                "type": "failure",
                "failure": failure.to_json(),
                "kill": process,
            }
        )

    @property
    def unaware(self) -> bool:
        """Whether some rank that is still there has not confirmed the failure."""
        # Asked by the training thread, while the loop's may let a rank in: hence a copy.
        return any(peer.is_in_run and not peer.acknowledged for peer in list(self.peers.values()))

    @property
    def others_are_there(self) -> bool:
        """Whether the run of some other rank is not over yet."""
        return any(peer.is_in_run and peer is not self._own for peer in self.peers.values())

    # ---- time ----

    def tick(self, seconds: float) -> None:
        """A period has gone by, of which this thread was there to see ``seconds``."""
        for peer in list(self.peers.values()):
            if peer is self._own or not peer.is_in_run:
                continue
            peer.silence_s += seconds
            reading = self._own.progress.read()
            peer.send({"type": "beat", "progress": reading.to_json()}, droppable=True)
            if peer.silence_s > self._limit:
                self._find_silent(peer, "", lambda: None)
        self._epochs.look()
        if not self.started or self.failure is not None:
            return
        found = self._hangs.tick(self.peers.values(), seconds)
        if found is not None:
            late, at, text = found
            self.declare(late.failure("timeout", text, at))

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


def _late(present: Sequence[Peer], asking: Peer) -> Peer | None:
    """Who is waited for, if no rank is silent: behind in steps, else in another phase than the rest; None if nobody."""
    readings = {peer.rank: peer.progress.read() for peer in present}
    first = min(present, key=lambda peer: readings[peer.rank].step)
    last = max(present, key=lambda peer: readings[peer.rank].step)
    if readings[first.rank].step < readings[last.rank].step:
        return first
    # All are in the same step. Where two phases have equally many ranks, that of the one who asks is the usual one.
    phases = Counter(reading.phase for reading in readings.values())
    own = readings[asking.rank].phase
    usual = max(phases, key=lambda phase: (phases[phase], phase == own))
    for peer in present:
        if readings[peer.rank].phase != usual:
            return peer
    if len(present) == 2:  # the other one has waited in vain
        return present[0] if present[1] is asking else present[1]
    return None
