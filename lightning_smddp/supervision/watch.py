"""The watching thread of a rank: it puts hub, client, timers, launcher and signals on one loop."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_smddp.supervision.acceptor import connect, listen
from lightning_smddp.supervision.client import Client, ParentWatch, State
from lightning_smddp.supervision.connection import Connection, Message
from lightning_smddp.supervision.failure import RUNS_HOOKS, Failure, Kind
from lightning_smddp.supervision.hangs import DeviceStillness
from lightning_smddp.supervision.hub import Hub
from lightning_smddp.supervision.loop import Loop
from lightning_smddp.supervision.peer import Peer
from lightning_smddp.supervision.processes import Process
from lightning_smddp.supervision.progress import Progress, place
from lightning_smddp.supervision.shutdown import Shutdown, write_to_stderr
from lightning_smddp.supervision.signals import Signals
from lightning_smddp.supervision.stop import AGREE_WITHIN_S

if TYPE_CHECKING:
    from torch.distributed import Store

KEY = "smddp/supervision"
HEARTBEAT_S = 1.0
RANKS_PER_SECOND = 32  # heartbeats that the hub takes in a second; with more ranks each comes less often
SECOND_SIGNAL_AFTER_S = 1.0  # a launcher may pass on what the terminal has sent to everyone
_FAREWELL_S = 0.3  # for last messages
_ALL_KNOW_S = 1.0  # for rank 0, until all others have confirmed that they know of the failure
_JOIN_S = 3.0  # for the watching thread to end
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchOptions:
    """As which rank a process watches its job, and for how long it waits. Times are in seconds.

    Attributes:
        rank: this global rank.
        world_size: number of ranks.
        collective_timeout: silence after which a rank has failed.
        host: this host's name, for messages.
        parent_pid: a launcher without which this rank must not go on; its end is a failure. None: nobody is watched,
            as is right for a process that a user started, whose shell may end before it.
        address: by which the other ranks reach the host of rank 0; rank 0 listens there.
        start_timeout: how long to wait for all ranks.
        stop_grace: how long after a request to stop the process may go on.
        grace: after a failure, within which the training thread has to raise.
        unwind: after a failure, within which it has to come to the end of its run.
    """

    rank: int
    world_size: int
    collective_timeout: float
    host: str = field(default_factory=socket.gethostname)
    parent_pid: int | None = None
    address: str = "127.0.0.1"
    start_timeout: float = 60.0
    stop_grace: float = 90.0
    grace: float = 3.0
    unwind: float = 8.0


class Watch:
    """Hub or client of the job's supervision, and the thread that they live in.

    Args:
        store: shared by the ranks; used by :meth:`begin` only.
        options: see there.
    """

    def __init__(self, store: Store, options: WatchOptions) -> None:
        self._store = store
        self._options = options
        self.rank = options.rank
        self._world_size = options.world_size
        self.host = options.host
        self.collective_timeout = options.collective_timeout
        self._stop_grace = options.stop_grace
        self.agree_within_s = min(AGREE_WITHIN_S, options.stop_grace / 4)
        crowd = max(1.0, options.world_size / RANKS_PER_SECOND)
        # Several heartbeats come in `collective_timeout`, after which silence is a failure. So they do in `stop_grace`:
        # with its end a stopped rank 0 is killed by those that have missed its heartbeats until then.
        self.period = min(HEARTBEAT_S * crowd, options.collective_timeout / 4, options.stop_grace / 6)
        self.progress = Progress()
        self.state = State()
        self.stop_signal: int | None = None
        self._stop_at = 0.0
        self._loop = Loop()
        self.shutdown = Shutdown(
            self._loop,
            self._where,
            lambda: self.state.waiting,
            self._others_run_hooks,
        )
        process = Process.of(os.getpid())
        self._own = Peer(self.rank, self.host, process, self.progress, None)
        self.client = Client(
            self._loop,
            self._own,
            self.collective_timeout,
            self.period,
            self.state,
            self._failed,
            self._stop_asked,
        )
        self.hub: Hub | None = None
        self.stillness: DeviceStillness | None = None
        self._signals: Signals | None = None
        self._parent: ParentWatch | None = None
        if options.parent_pid is not None:
            self._parent = ParentWatch(self._loop, options.parent_pid, self.client.parent_ended)
        self._thread = threading.Thread(target=self._run, name="smddp-supervisor", daemon=True)
        self._ticked_at = time.monotonic()

    # ---- start ----

    def begin(self) -> None:
        """Find the hub, or be it, and start the thread. Blocks until this rank is connected to the hub."""
        number = self._store.add(f"{KEY}/starts/{self.rank}", 1)  # the same on all ranks
        key = f"{KEY}/{number}"
        if self.rank == 0:
            self._be_hub(key)
        else:
            self._join_hub(key)
        self._loop.later(self.period, self._tick)
        self._ticked_at = time.monotonic()
        self._thread.start()

    def _be_hub(self, key: str) -> None:
        self.hub = Hub(
            self._loop,
            self._own,
            self._world_size,
            self.period,
            self.collective_timeout,
            lambda message: self._loop.call(self.client.receive, message),
            self.agree_within_s,
        )
        # Rank 0's client and the hub talk through the loop, as over a connection: no message is handled in the middle
        # of another one.
        self.client.tell = lambda message: self._loop.call(self._receive_own, message)
        if self._world_size == 1:
            self.hub.open(None, self._options.start_timeout)
            return
        address = self._options.address
        listener = listen(address)
        bound, port = listener.getsockname()[:2]
        found = {"addresses": [bound, address], "port": port, "secret": self.hub.secret}
        self._store.set(key, json.dumps(found))
        _log.info("The supervisor of this job listens on %s port %d until all ranks are there.", bound, port)
        self.hub.open(listener, self._options.start_timeout)

    def _join_hub(self, key: str) -> None:
        deadline = time.monotonic() + self._options.start_timeout
        self._store.wait([key], timedelta(seconds=self._options.start_timeout))
        # The address that rank 0 listens on, the name by which it knows itself, and that by which this rank knows it:
        # any of these may be the one that leads there.
        found = json.loads(self._store.get(key))
        addresses = list(dict.fromkeys([*found["addresses"], self._options.address]))
        try:
            peer = connect(addresses, found["port"], deadline)
        except OSError as error:
            tried = " or ".join(addresses)
            raise ValueError(
                f"Rank {self.rank} (host {self.host}) cannot reach rank 0 at {tried}, port {found['port']}: {error}. "
                "Set MASTER_ADDR to an address of the host of rank 0 that all hosts reach."
            ) from error
        connection = Connection(self._loop, peer, lambda message: None, lambda reason: None)
        self.client.join(connection)
        connection.send(
            {
                "secret": found["secret"],
                "rank": self.rank,
                "world_size": self._world_size,
                "host": self.host,
                "process": self._own.process.to_json(),
                "descriptor": self.progress.descriptor,
            }
        )

    # ---- for the training thread ----

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Have it called in the watching thread."""
        self._loop.call(function, *args)

    def tell(self, message: Message) -> None:
        """A message to the hub, after the newest progress."""
        self._loop.call(self.client.beat)
        self._loop.call(lambda: self.client.tell(message))

    def report(self, kind: Kind, text: str, of_communication: bool) -> None:
        """This rank has failed, as ``kind`` and ``text`` say: the hub is told. May be called in any thread."""
        failure = self._own.failure(kind, text)
        self._loop.call(self.client.report, failure, of_communication)

    def report_timeout(self, text: str) -> None:
        """This rank's collective has timed out; the hub finds out whose fault that is."""
        self._loop.call(self._report_timeout, text)

    def _report_timeout(self, text: str) -> None:
        if self.client.hub_is_late:
            self.client.declare_hub_silent()
        else:
            self.client.beat()
            self.client.tell({"type": "timeout", "message": text})

    def install_signals(self, signums: Iterable[int]) -> None:
        """Take over these signals, for the main thread: each asks all ranks to stop. The first call counts."""
        if self._signals is None:
            self._signals = Signals(self._loop, self._signalled, signums)

    def request_stop(self, signum: int) -> None:
        """Ask all ranks to stop, as the signal ``signum`` does. For any thread."""
        self._loop.call(self._ask_to_stop, int(signum))

    def close(self, patience: float) -> None:
        """Goodbye, then the end of the thread and of everything that it has."""
        if self._signals is not None and threading.current_thread() is threading.main_thread():
            self._signals.restore()
        if self._thread.ident is not None:  # it was started
            self._say_goodbye(patience)
            self._loop.stop()
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._let_go()

    def _say_goodbye(self, patience: float) -> None:
        disagreed = self.state.gate.decision == (None,)  # some rank does not answer any more
        if disagreed:
            patience = min(patience, _FAREWELL_S)
        if self.state.welcomed and self.state.failure is None:
            self._loop.call(lambda: self.client.tell({"type": "bye"}))
            self.state.wait_for(lambda: self.state.goodbye, patience)
        # Asked again: a failure may have come while this rank was waiting.
        if self.hub is not None and self.state.failure is not None:
            self._wait_until_all_know(self.hub)
        self.shutdown.is_over = True
        if disagreed:
            self._loop.call(self.client.kill_missing)
        if self.hub is not None:
            self._loop.call(self.hub.say_bye)

    def _wait_until_all_know(self, hub: Hub) -> None:
        """Before rank 0 goes, lest its end is taken for the cause."""
        deadline = time.monotonic() + _ALL_KNOW_S
        # A plain wait, in the training thread: the loop's thread goes on sending meanwhile.
        while hub.unaware and time.monotonic() < deadline:
            time.sleep(0.01)

    def abandon(self) -> None:
        """In a forked child: close what belongs to the parent, and give it its own signals back."""
        if self._signals is not None:
            self._signals.restore()
            self._signals.close(watched=False)
        # The selector is shared with the parent: to unregister a descriptor from it would end the parent's watching. So
        # it is closed first, and then what it had.
        self._loop.close()
        for part in (self.hub, self.client.hub, self.client.neighbour, self._parent):
            if part is not None:
                part.abandon()
        self.progress.close()

    def _let_go(self) -> None:
        for part in (self._signals, self.hub, self.client.hub, self.client.neighbour, self._parent):
            if part is not None:
                part.close()
        self._loop.close()
        self.progress.close()

    # ---- in the watching thread ----

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            _log.exception("The supervisor of rank %d failed", self.rank)
            failure = self._own.failure("exception", f"its supervisor failed: {error!r}")
            self.state.attention = True
            self.state.update(failure=failure)
            # The others find out at once: their connections to this rank end without a goodbye.
            for part in (self.hub, self.client.hub):
                if part is not None:
                    part.close()

    def _receive_own(self, message: Message) -> None:
        assert self.hub is not None
        self.hub.receive(self.hub.peers[0], message)

    def _tick(self) -> None:
        """Once a period. Time that this thread slept through, as the whole machine may have, is not counted."""
        now = time.monotonic()
        seen = min(now - self._ticked_at, 1.5 * self.period)
        self._ticked_at = now
        if self.stillness is not None:
            self.stillness.tick(seen)
        self.client.tick(seen)
        if self.hub is not None:
            self.hub.tick(seen)
        if self._parent is not None:
            self._parent.look()
        self._loop.later(self.period, self._tick)

    def _failed(self, failure: Failure) -> None:
        if not self.state.welcomed:
            return
        grace = self._options.grace
        if self.stillness is not None and failure.kind == "timeout" and failure.rank == self.rank:
            grace /= 3  # it hangs: its end sets hosts free that wait for it by gloo, before their own time is over
        self.shutdown.after_failure(failure, self._exit_code, grace, self._options.unwind)

    def _others_run_hooks(self) -> bool:
        """Rank 0 may have started the others, and ends them with itself. The rest need not wait for each other."""
        failure = self.state.failure
        if failure is None or failure.kind not in RUNS_HOOKS or failure.rank == self.rank:
            return False
        if self.hub is not None:
            return self.hub.others_are_there
        return not self.state.first_is_over

    def _exit_code(self) -> int:
        """As a shell shows the end by a signal, if a stop was asked for."""
        if self.stop_signal is None:
            return 1
        return 128 + self.stop_signal

    def _where(self) -> str:
        at = self.progress.read()
        return f"{self._own.name}{place(at.step, at.phase)}"

    # ---- stops ----

    def _signalled(self, signum: int) -> None:
        """The first signal asks for a stop; a second one, or one after a failure, ends this process."""
        failure = self.state.failure
        if failure is None and self.stop_signal is None:
            self._ask_to_stop(signum)
            return
        if self.stop_signal is not None and time.monotonic() - self._stop_at < SECOND_SIGNAL_AFTER_S:
            return
        name = signal.Signals(signum).name
        text = f"{name} came again"
        if failure is not None:
            text = f"{name} came after this failure: {failure.describe()}"
        wait_s = _FAREWELL_S
        if self.stop_signal is None and signum == signal.SIGTERM:
            # A launcher sends SIGTERM as soon as one rank has ended, while another is in a hook of the user's.
            wait_s = max(_FAREWELL_S, self.shutdown.postponed_s)
        if self.stop_signal is None:
            self.stop_signal = signum
        self._stop_at = time.monotonic()
        self.report("stopped", text, False)
        self._loop.later(wait_s, self._force, text)

    def _ask_to_stop(self, signum: int) -> None:
        if self.stop_signal is not None:
            return
        self._stop_asked(signum)
        self.client.tell({"type": "stop", "signum": signum})
        # The first decision counts: this one only if the hub does not answer.
        self._loop.later(self.agree_within_s + 2.0, self.client.decide, signum, None)

    def _stop_asked(self, signum: int) -> None:
        """Here or on another rank; from now on the time is short."""
        if self.stop_signal is not None:
            return
        self.stop_signal = signum
        self._stop_at = time.monotonic()
        name = signal.Signals(signum).name
        grace = f"{self._stop_grace:g} s"
        self._loop.later(self._stop_grace, self._force, f"it did not stop within {grace} of {name}")
        if self.rank == 0:  # once for the job: Ctrl+C reaches all ranks of a terminal
            write_to_stderr(
                f"lightning-smddp: {name}: all ranks stop at one of the next steps, within {grace}. "
                "A second signal ends a rank at once.\n"
            )

    def _force(self, text: str) -> None:
        if not self.shutdown.is_over:
            self.client.kill_missing()
            self.shutdown.force(self._exit_code(), text)
