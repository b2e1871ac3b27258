"""A rank's side of the watching thread: what it hears from the hub, and the state that the training thread reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from lightning_smddp.supervision.connection import Connection, Message
from lightning_smddp.supervision.failure import Failure
from lightning_smddp.supervision.loop import Loop
from lightning_smddp.supervision.peer import Peer
from lightning_smddp.supervision.processes import Process, has_ended
from lightning_smddp.supervision.progress import Reading, RemoteProgress
from lightning_smddp.supervision.stop import StopGate


class State:
    """What the watching thread has heard, for the training thread to read and to wait for.

    Attributes:
        attention: there is a failure or a request to stop: the training thread has to look. Read without the lock, at
            every step.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: Failure | None = None
        self.first_is_over = False  # the run of the rank that failed first
        self.attention = False
        self.welcomed = self.goodbye = False
        self.epoch = -1  # last one that all ranks have ended
        self.gate = StopGate()
        self.waiting = False  # the training thread waits here, and raises by itself

    def update(self, **values: Any) -> None:
        """Set attributes and wake who waits."""
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def wait_for(self, ready: Callable[[], object], timeout: float | None) -> bool:
        """Wait until ``ready()`` or a failure; whether one of them came."""
        self.waiting = True
        try:
            with self.changed:
                return bool(self.changed.wait_for(lambda: self.failure is not None or ready(), timeout))
        finally:
            self.waiting = False


class Client:
    """Belongs to the loop's thread.

    Args:
        loop: of the watching thread.
        own: this rank itself.
        limit: seconds of silence after which the hub has failed.
        period: seconds between heartbeats.
        state: for the training thread.
        on_failure: called once, with the failure that all ranks agree on.
        on_stop: called with the signal when the job is asked to stop.
    """

    def __init__(
        self,
        loop: Loop,
        own: Peer,
        limit: float,
        period: float,
        state: State,
        on_failure: Callable[[Failure], None],
        on_stop: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._own = own
        self.rank = own.rank
        self._limit = limit
        self._period = period
        self._state = state
        self._on_failure = on_failure
        self._on_stop = on_stop
        self.tell: Callable[[Message], None] = lambda message: None  # to the hub
        self.hub: Peer | None = None  # of a rank other than 0
        self.neighbour: Peer | None = None  # watched for a hub on another host
        self.pids: frozenset[int] = frozenset()
        self.missing: list[Process] = []  # did not answer when the ranks were asked where to stop

    def join(self, connection: Connection) -> None:
        """Use this connection to the hub, whose name comes with its welcome."""
        connection.on_message = self.receive
        connection.on_end = lambda reason: self._hub_ended(self.hub, reason)
        process = Process(0, 0, "")  # unknown, as its progress
        self.hub = Peer(0, "of rank 0", process, RemoteProgress(None, -1), connection)
        self.tell = connection.send

    def receive(self, message: Message) -> None:
        """A message of the hub; raises ``ValueError``, ``KeyError`` or ``TypeError`` if it is none."""
        kind = message["type"]
        if self.hub is not None:
            self.hub.silence_s = 0.0
        if kind == "beat":
            self._heard(message)
        elif kind == "ping":
            self.beat()
        elif kind == "welcome":
            self._welcomed(message)
        elif kind == "failure":
            failure = Failure.from_json(message["failure"])
            kill = message["kill"]
            self.record(failure, Process.from_json(kill) if kill is not None else None)
        elif kind == "ask":
            self._asked(int(message["signum"]))
        elif kind == "stop":
            self.missing = [Process.from_json(values) for values in message["missing"]]
            self.decide(int(message["signum"]), message["step"])
        elif kind == "epoch":
            self._state.update(epoch=int(message["epoch"]))
        elif kind == "refused":
            text = f"the supervisor of rank 0 refused it: {message['reason']}"
            self.record(self._own.failure("exception", text), None)
        elif kind == "over":
            self._state.update(first_is_over=True)
        elif kind == "bye":
            self._left()
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _heard(self, message: Message) -> None:
        if self.hub is not None and isinstance(self.hub.progress, RemoteProgress):
            self.hub.progress.told = Reading.from_json(message["progress"])

    def _asked(self, signum: int) -> None:
        """How far this rank has come, and so where it can stop."""
        self._state.attention = True  # before the answer reads the step
        first = self._state.gate.answer(signum)
        self._state.update()
        self.tell({"type": "ready", "step": first})
        self._on_stop(signum)

    def _left(self) -> None:
        if self.hub is not None:
            self.hub.has_left = True
        self._state.update(goodbye=True, first_is_over=True)

    def _welcomed(self, message: Message) -> None:
        ranks: dict[int, tuple[Process, int]] = {}
        for rank, values, descriptor in message["ranks"]:
            ranks[int(rank)] = (Process.from_json(values), int(descriptor))
        # Never killed as workers of another rank's process: rank 0 may have started the other ranks of its host.
        self.pids = frozenset(process.pid for process, _ in ranks.values())
        if self.hub is not None:
            process = Process.from_json(message["process"])
            pid = process.pid if process.is_here else None
            self.hub.host = str(message["host"])
            self.hub.process = process
            self.hub.progress = RemoteProgress(pid, int(message["descriptor"]))
            self.hub.watch_process(self._loop, self._hub_ended)
            if not process.is_here:
                self._watch_neighbour(ranks)
        self._state.update(welcomed=True)

    def _watch_neighbour(self, ranks: dict[int, tuple[Process, int]]) -> None:
        """The hub does not see how a process of this host ends: each rank tells it of the next one."""
        others = [rank for rank, (process, _) in ranks.items() if process.is_here and rank != self.rank]
        if not others:
            return
        # A ring: the last rank of the host watches the first one.
        higher = [rank for rank in others if rank > self.rank]
        following = min(higher or others)
        process, descriptor = ranks[following]
        progress = RemoteProgress(process.pid, descriptor)
        self.neighbour = Peer(following, self._own.host, process, progress, None)
        self.neighbour.watch_process(self._loop, self._neighbour_ended)

    def _neighbour_ended(self, neighbour: Peer, how: str) -> None:
        def tell(text: str) -> None:
            reading = neighbour.progress.read()
            self.tell(
                {
                    "type": "ended",
                    "rank": neighbour.rank,
                    "how": text,
                    "progress": reading.to_json(),
                }
            )

        neighbour.settle(self._loop, how, tell)

    def decide(self, signum: int, step: int | None) -> None:
        """All ranks stop at ``step``; None: there is no agreement. The first decision counts."""
        gate = self._state.gate
        if gate.decision is None:
            gate.answer(signum)
            gate.decision = (step,)
            self._state.update(attention=True)

    def beat(self) -> None:
        """Tell the hub how far this rank is."""
        if self.hub is None:
            return
        reading = self._own.progress.read()
        self.hub.send({"type": "beat", "progress": reading.to_json()}, droppable=True)

    def tick(self, seconds: float) -> None:
        """A period has gone by, of which this thread was there to see ``seconds``."""
        self.beat()
        if self.hub is None or not self.hub.is_in_run:
            return
        self.hub.silence_s += seconds
        if self.hub.silence_s > self._limit:
            self.declare_hub_silent()

    @property
    def hub_is_late(self) -> bool:
        """Whether the hub has missed several heartbeats."""
        if self.hub is None or not self.hub.is_in_run:
            return False
        return self.hub.is_late(self._period)

    def declare_hub_silent(self) -> None:
        """Rank 0 is stopped or cut off."""
        assert self.hub is not None
        failure = self.hub.failure("silent", self.hub.silence(None))
        self.record(failure, self.hub.process)

    def parent_ended(self, pid: int, text: str) -> None:
        """The launcher of this rank has gone; if that is rank 0 itself, the cause is whatever ended that."""
        hub = self.hub
        if hub is not None and hub.process.pid == pid and hub.process.is_here:
            self._hub_ended(hub, "its process ended")
        else:
            self.report(self._own.failure("died", text), False)

    def report(self, failure: Failure, of_communication: bool) -> None:
        """This rank has failed: tell the hub, which tells everyone including this rank."""
        if self.hub is None or self.hub.is_in_run:
            self.tell(
                {
                    "type": "failure",
                    "failure": failure.to_json(),
                    "of_communication": of_communication,
                }
            )
            return
        # No hub any more. A collective that breaks because rank 0 has left the run early is not this rank's fault.
        if of_communication and self.hub.has_left:
            text = f"it ended its run while rank {self.rank} was in the middle of its own: {failure.message}"
            failure = self.hub.failure("left", text)
        self.record(failure, None)

    def _hub_ended(self, hub: Peer | None, how: str) -> None:
        if hub is None or not hub.is_in_run:
            return
        if self.hub_is_late:  # it was stopped, and another rank has killed it for that already
            self.declare_hub_silent()
        hub.has_ended = True
        self._state.update(first_is_over=True)

        def died(text: str) -> None:
            self.record(hub.failure("died", text), None)

        hub.settle(self._loop, how, died)

    def record(self, failure: Failure, kill: Process | None) -> None:
        """Note the job's first failure, once: wake the training thread, and start counting its time to end.

        ``kill`` is a process that hangs or is stopped and cannot end by itself: ranks of its host kill it.
        """
        if self._state.failure is not None:
            return
        self.tell({"type": "ack"})
        # In this order: a training thread that looks in between waits in `gate`, until the failure is there as well.
        self._state.attention = True
        self._state.update(failure=failure)
        if kill is not None and kill.pid != os.getpid():
            kill.kill_with_workers(self.pids)
        self._on_failure(failure)

    def kill_missing(self) -> None:
        """SIGKILL to the processes of this host that did not even answer the question where to stop."""
        missing = list(self.missing)
        if self.hub_is_late and self.hub is not None:
            missing.append(self.hub.process)
        for process in missing:
            if process.pid != os.getpid():
                process.kill_with_workers(self.pids)  # nothing happens if it is of another host


class ParentWatch:
    """Calls ``on_end(pid, text)`` once when the process that started this one has gone.

    Not by PR_SET_PDEATHSIG: that signal may be ignored or blocked, and comes when the parent's *thread* ends.
    """

    def __init__(self, loop: Loop, pid: int, on_end: Callable[[int, str], None]) -> None:
        self._loop = loop
        self._pid = pid
        self._on_end = on_end
        self._is_parent = os.getppid() == pid
        self._process = Process.of(pid)
        self._descriptor = self._process.open()
        self._done = False
        if self._descriptor is not None:
            loop.watch(self._descriptor, self.look)

    def look(self) -> None:
        """Once a period, and when the descriptor says so."""
        if self._done:
            return
        if self._descriptor is not None:
            gone = has_ended(self._descriptor)
        else:
            gone = self._process.namespace != "" and not self._process.exists()
        # A process whose parent has ended gets another one.
        if self._is_parent and os.getppid() != self._pid:
            gone = True
        if gone:
            self.close()
            self._on_end(self._pid, f"its launcher (process {self._pid}) ended")

    def close(self) -> None:
        """Stop watching the process, and let go of its descriptor."""
        self._done = True
        if self._descriptor is not None:
            self._loop.unwatch(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """The same in a forked child."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
