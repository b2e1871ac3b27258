"""A rank as another rank's watching thread sees it: its process, its connection, and how either ended."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Protocol

from lightning_smddp.supervision.connection import Connection, Message
from lightning_smddp.supervision.failure import Failure, Kind, failure_of
from lightning_smddp.supervision.loop import Loop
from lightning_smddp.supervision.processes import Process, ending, has_ended, oom_counters, oom_kills
from lightning_smddp.supervision.progress import Reading, RemoteProgress

_SETTLE_S = 0.1  # a connection ends a little before its process, and last messages may still be on their way
_LATE_BEATS = 3.0  # so many periods without a heartbeat are more than an accident
_MAX_LOOKS = 6  # of _SETTLE_S each
_OOM_WINDOW = 10  # ticks
_OOM_TICK_S = 1.0


class _Readable(Protocol):
    """``Progress`` of this rank, ``RemoteProgress`` of another."""

    descriptor: int

    def read(self) -> Reading: ...


class OomWatch:
    """Whether the kernel killed for lack of memory lately in the cgroup of ``process``."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._counters: tuple[str, ...] = ()
        # The kernel's counts at the last ticks, the oldest one first: a kill is a while before its end is noticed.
        self._counts: deque[int] = deque(maxlen=_OOM_WINDOW)
        self.tick()

    def tick(self) -> None:
        """Note the kernel's count of out-of-memory kills; called once a second while the process runs."""
        counters = oom_counters(self._process.pid)
        if not self._process.exists():  # it is in no cgroup any more
            return
        if counters != self._counters:
            self._counters = counters
            self._counts.clear()
        self._counts.append(oom_kills(counters))

    def happened(self) -> bool:
        """Whether the kernel has killed a process for memory since ten ticks ago."""
        return bool(self._counts) and oom_kills(self._counters) > self._counts[0]


class Peer:
    """A rank of the job.

    Args:
        rank: its global rank.
        host: its host's name.
        process: its process.
        progress: where to read how far it is.
        connection: to it; None for the rank that this thread belongs to.
    """

    def __init__(
        self, rank: int, host: str, process: Process, progress: _Readable, connection: Connection | None
    ) -> None:
        self.rank = rank
        self.host = host
        self.process = process
        self.progress = progress
        self.connection = connection
        self.silence_s = 0.0
        self.has_left = False  # said goodbye
        self.has_ended = False
        self.acknowledged = False
        self.account: str | None = None  # how it ended, by a rank of its host
        self._descriptor: int | None = None
        self._loop: Loop | None = None
        self._oom: OomWatch | None = None

    @property
    def is_in_run(self) -> bool:
        """Whether it still takes part in the run, so that its end would be a failure."""
        return not self.has_left and not self.has_ended

    def is_late(self, period: float) -> bool:
        """Whether it has missed several heartbeats, of which one comes each ``period`` seconds."""
        return self.silence_s > _LATE_BEATS * period

    @property
    def name(self) -> str:
        """The rank and its host, as error messages name it."""
        return f"rank {self.rank} (host {self.host})"

    def silence(self, company_is_heard: bool | None) -> str:
        """What its silence means: on another host that depends on the other ranks there; None: there are none."""
        if self.process.is_here:
            cause = ": it is stopped, or cut off"
        elif company_is_heard is None:
            cause = ": its process is stopped, its host is down, or the network between the hosts is cut"
        elif company_is_heard:
            cause = ": it is stopped, as other ranks of its host are heard"
        else:
            cause = f", nor from any rank of host {self.host}: that is down, or the network between the hosts is cut"
        return f"nothing was heard from it for {self.silence_s:.0f} s{cause}"

    def failure(self, kind: Kind, message: str, at: Reading | None = None) -> Failure:
        """A failure of this rank that is noticed now, in the step and phase of ``at``, or those that it last told."""
        if at is None:
            at = self.progress.read()
        return failure_of(self.rank, self.host, self.process.pid, at, kind, message)

    def send(self, message: Message, droppable: bool = False) -> None:
        """To its process; a ``droppable`` one not before it has taken the earlier ones."""
        if self.connection is None:
            return
        if droppable and self.connection.is_clogged:
            return
        self.connection.send(message)

    def watch_process(self, loop: Loop, on_end: Callable[[Peer, str], None]) -> None:
        """Call ``on_end(self, how)`` when its process ends, if it is on this host.

        Needed beside the connection: processes that it started may hold that open.
        """
        self._descriptor = self.process.open()
        self._loop = loop
        if self._descriptor is None:
            return
        descriptor = self._descriptor
        self._oom = OomWatch(self.process)
        loop.later(_OOM_TICK_S, self._look_for_kills)

        def ended() -> None:
            loop.unwatch(descriptor)
            if self.connection is not None:
                # What it sent before its end comes first: a goodbye, or its own word on why it fails.
                self.connection.receive()
            on_end(self, "its process ended")

        loop.watch(descriptor, ended)

    def settle(
        self,
        loop: Loop,
        how: str,
        then: Callable[[str], None],
        looks: int = 0,
    ) -> None:
        """Find out how it ended and call ``then(text)``; takes a moment.

        On another host only a rank there can see that; its ``account`` may come meanwhile.
        """
        # Not at the first look: its last messages, with the real cause maybe, are to come before.
        descriptor = self._descriptor
        if self.account is not None:
            then(self.account)
        elif looks > 0 and descriptor is not None and has_ended(descriptor):
            then(self._how_it_ended(descriptor))
        elif looks < _MAX_LOOKS:
            loop.later(_SETTLE_S, self.settle, loop, how, then, looks + 1)
        elif descriptor is None:
            then(f"its process or its connection ended ({how})")
        else:
            then(f"its connection ended ({how}), though its process did not yet")

    def _look_for_kills(self) -> None:
        if self._loop is not None and self._oom is not None and self._descriptor is not None and not self.has_ended:
            self._oom.tick()
            self._loop.later(_OOM_TICK_S, self._look_for_kills)

    def _how_it_ended(self, descriptor: int) -> str:
        text = f"its process {ending(self.process.pid, descriptor)}"
        if "SIGKILL" in text and self._oom is not None and self._oom.happened():
            text += ", most likely by the kernel for lack of memory (OOM): it has just killed a process for that"
        return text

    def close(self) -> None:
        """Close the connection, and the descriptor by which the process is watched."""
        if self.connection is not None:
            self.connection.close()
        if self._descriptor is not None and self._loop is not None:
            self._loop.unwatch(self._descriptor)
        self._close_descriptor()

    def abandon(self) -> None:
        """The same in a forked child."""
        if self.connection is not None:
            self.connection.abandon()
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        if isinstance(self.progress, RemoteProgress):
            self.progress.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
