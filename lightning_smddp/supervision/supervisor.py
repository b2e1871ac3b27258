"""A rank's supervisor: what the training thread calls. One thread beside it watches the job."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lightning_smddp.communication.errors import RankTimeoutError
from lightning_smddp.supervision.failure import RUNS_HOOKS, Failure, Kind, is_of_communication, is_timeout, text_of
from lightning_smddp.supervision.hangs import Device, DeviceStillness, in_collective
from lightning_smddp.supervision.shutdown import InterruptionError
from lightning_smddp.supervision.stop import Stop
from lightning_smddp.supervision.watch import Watch, WatchOptions

if TYPE_CHECKING:
    from torch.distributed import Store

_REPORT_WITHIN_S = 1.0  # until the hub's word on a report has come back
_FIND_WITHIN_S = 2.0  # whose fault it is that a collective has timed out
_GOODBYE_WITHIN_S = 2.0  # until the hub answers
_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()


class Supervisor:
    """Watches all ranks of a job from one. Make it by :meth:`start`; end it by :meth:`close`.

    Everything but ``failure`` and ``request_stop`` belongs to the thread that called :meth:`start`.

    When a failure comes to the watching thread, the training thread has ``grace`` seconds to raise by itself; it is
    interrupted if it runs Python code. When it has called :meth:`explain` it has ``unwind`` seconds to come to
    :meth:`close`. Else the process ends: one line on stderr, clean-ups, ``os._exit(1)`` (128 + the signal's number
    after a request to stop).

    Attributes:
        progress: set its attributes as training goes on; see ``progress.py``.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._state = watch.state
        self._shutdown = watch.shutdown
        self._gate = watch.state.gate
        self.rank = watch.rank
        self.progress = watch.progress
        self._pid = os.getpid()
        self._closed = False
        _live.add(self)

    @classmethod
    def start(cls, store: Store, options: WatchOptions) -> Supervisor:
        """Start watching, together with all other ranks. Collective: call it equally often on every rank.

        Args:
            store: shared by the ranks, such as the process group's. Used now only.
            options: as which rank, and how long to wait for what.

        Raises:
            ValueError: rank 0 cannot listen on ``options.address``.
            RankTimeoutError: not all ranks came in time; the message says who is missing.
            RankFailedError: a rank failed meanwhile.
        """
        watch = Watch(store, options)
        supervisor = cls(watch)
        try:
            watch.begin()
            supervisor._await_welcome(options.start_timeout)
        except BaseException:
            supervisor.close()
            raise
        return supervisor

    def _await_welcome(self, seconds: float) -> None:
        state = self._state
        state.wait_for(lambda: state.welcomed, seconds + _REPORT_WITHIN_S)
        failure = state.failure
        if failure is not None and failure.kind == "timeout":
            raise RankTimeoutError(failure.rank, str(failure.error()))
        self._raise_failure()
        if not state.welcomed:
            raise RankTimeoutError(0, f"Rank 0 did not start the job within {seconds:g} s.")

    # ---- failures ----

    @property
    def failure(self) -> Failure | None:
        """The first failure of the job, as all ranks agree on it; None if there is none."""
        return self._state.failure

    def report(self, error: BaseException) -> None:
        """This rank fails by ``error``. Returns when all ranks are being told, or after a second."""
        self._shutdown.take_over(error)
        kind: Kind = "exception"
        text = text_of(error)
        if isinstance(error, SystemExit):
            kind = "left"
            text = f"it called sys.exit({error.code!r}) in the middle of the run"
        elif isinstance(error, KeyboardInterrupt):
            kind = "stopped"
        self._watch.report(kind, text, is_of_communication(error))
        self._state.wait_for(lambda: False, _REPORT_WITHIN_S)

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for ``error``, which is about to end training: itself, or the failure that it follows from.

        An error of communication waits up to two seconds for word of the rank that caused it. An error of this rank's
        own is reported to the others. An exit after an agreed stop is neither.

        Returns:
            ``error``, or a ``RankFailedError`` that names the first cause; raise that ``from error``.
        """
        self._shutdown.take_over(error)
        if isinstance(error, InterruptionError):
            return error
        if self.stop_decided and not isinstance(error, Exception):  # the exit after a stop
            return error
        # An error of communication follows from something, of which the hub tells all ranks alike. About a timeout it
        # has to be asked, as nobody has ended.
        follows = is_of_communication(error)
        if follows and self.failure is None:
            if is_timeout(error):
                self._watch.report_timeout(text_of(error))
            self._state.wait_for(lambda: False, _FIND_WITHIN_S)
        if self.failure is None:
            self.report(error)
        failure = self.failure
        if failure is None or not follows:
            return error
        if failure.rank == self.rank and failure.kind == "exception":
            return error
        explained = failure.error()
        if str(error) == str(explained):
            return error
        return explained

    def at_emergency(self, clean_up: Callable[[], object]) -> None:
        """Call ``clean_up`` before a forced end, in a thread of its own and for a second at most; last one first."""
        self._shutdown.clean_ups.append(clean_up)

    def at_failure(self, release: Callable[[], object]) -> None:
        """Call ``release`` once after a failure, in a thread: it sets free a training thread that waits for a device.

        That is half a second after it, if no error has come to the training thread by then; at the latest when that
        has had its time to raise.
        """
        self._shutdown.releases.append(release)

    def watch_device(self, device: Device) -> None:
        """Find hangs of this rank's device, which raise nothing: see ``supervision/hangs.py``."""
        watch = self._watch
        thread = threading.get_ident()
        watch.stillness = DeviceStillness(
            self.progress,
            device,
            watch.period,
            lambda: in_collective(thread),
        )

    def postpone(self, seconds: float) -> None:
        """No forced end because of a failure within ``seconds`` from now: something is being saved."""
        self._shutdown.postpone(seconds)

    def allow_hooks(self, seconds: float) -> None:
        """The user's hooks for exceptions may take so long on any rank, counted from the failure.

        So long a training thread that has not raised is not ended by force where that would cut off those of another
        rank.
        """
        self._shutdown.hooks_s = seconds

    def await_first(self, seconds: float) -> bool:
        """Wait until the run of the rank that failed first is over, as launchers end all ranks when one has ended.

        Returns:
            Whether there was anything to wait for.
        """
        failure = self.failure
        state = self._state
        if failure is None or failure.kind not in RUNS_HOOKS or failure.rank == self.rank:
            return False
        if state.first_is_over:
            return False
        with state.changed:
            state.changed.wait_for(lambda: state.first_is_over, seconds)
        return True

    # ---- stops ----

    def install_signals(self, signums: Iterable[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        """These signals ask all ranks to stop, until :meth:`close`. In the main thread only, else ``ValueError``.

        A second one, a second or more after the first, ends this process at once.
        """
        self._watch.install_signals(signums)

    def request_stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask all ranks to stop, as if the signal had come. For any thread; again has no effect."""
        self._watch.request_stop(signum)

    @property
    def stop_signal(self) -> int | None:
        """The signal by which the job was asked to stop; None if it was not."""
        return self._watch.stop_signal

    @property
    def stop_decided(self) -> bool:
        """Whether it is settled where to stop, or that there is no agreement."""
        return self._gate.decision is not None

    def gate(self, step: int) -> Stop | None:
        """Whether to stop here. Call it where that is possible, with the same rising numbers on every rank.

        Usually this stores a number and looks at a flag. Once a stop is asked for it waits until the ranks have
        agreed on the step, a few seconds at most.

        Raises:
            RankFailedError: there is a failure.
        """
        self._gate.step = step
        if self._state.attention:
            return self._attend(step)
        return None

    def _attend(self, step: int) -> Stop | None:
        gate = self._gate
        patience = self._watch.agree_within_s + 2.0
        came = self._state.wait_for(lambda: gate.may_pass(step), patience)
        self._raise_failure()
        if came:
            return gate.verdict(step)
        signum = gate.signum or signal.SIGTERM
        self._watch.call(self._watch.client.decide, signum, None)
        return Stop(signum, step, agreed=False)

    # ---- epochs ----

    def end_of_epoch(self, epoch: int, batches: int, validates: bool = False) -> None:
        """Wait until every rank is at the end of ``epoch``, with as many batches. Collective.

        ``validates`` says that this rank does so before a validation.

        Needs ``progress.start_epoch`` and ``progress.batches`` on every rank, so that ranks with more batches are
        found out while they wait for this one elsewhere.

        Raises:
            RankFailedError: a rank failed, had another number of batches, or ended its run.
        """
        self._state.epoch = -1  # one of this number may have ended before; the answer needs this rank's message
        self._watch.tell(
            {
                "type": "epoch",
                "epoch": epoch,
                "batches": batches,
                "validates": validates,
            }
        )
        seconds = self._watch.collective_timeout
        came = self._state.wait_for(lambda: self._state.epoch >= epoch, seconds)
        if not came:
            self._watch.report_timeout(f"it waited {seconds:g} s at the end of epoch {epoch}")
            self._state.wait_for(lambda: False, _FIND_WITHIN_S)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure.error()

    # ---- end ----

    def close(self, patience: float = 5.0) -> Failure | None:
        """Say goodbye and stop watching; the thread, its sockets and signal handlers are gone afterwards.

        Rank 0 waits up to ``patience`` seconds for the other ranks' goodbyes. Whoever ends without one has failed.

        Returns:
            The failure of the job, if there was one, also one that came while this rank was waiting here.
        """
        # In a forked child this object is a copy of the parent's, for which it must not say goodbye.
        if self._closed or os.getpid() != self._pid:
            return self.failure
        self._closed = True
        self._shutdown.take_over()
        if self.rank != 0:
            patience = _GOODBYE_WITHIN_S
        self._watch.close(patience)
        _live.discard(self)
        return self.failure

    def _forget(self) -> None:
        if not self._closed:
            self._closed = True
            self._watch.abandon()


def _forget_all() -> None:
    for supervisor in list(_live):
        supervisor._forget()
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
