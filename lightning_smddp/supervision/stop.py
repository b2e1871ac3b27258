"""How a rank ends: with all others at one step, when a signal asks for that, or by force, when the job has failed.

Once a stop is asked for, each rank's watching thread answers with the first step at which its training thread can still
stop, and from then on that thread waits in ``gate()`` at this step. The largest answer is the step at which all stop:
nobody is beyond it, and the ones before it go on until they come to it. The answers come from threads that no
collective blocks, so this cannot deadlock.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.util
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_smddp._compat.torch import is_loader_worker
from lightning_smddp.communication.groups import abort_groups

END = 2**62  # a place to stop at, behind all others
AGAIN_AFTER_S = 1.0  # a launcher may pass on what the terminal has sent to everyone
_SIGNALS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}  # Python's own
GRACE_S = 3.0  # from a failure on, within which the training thread has to raise
UNWIND_S = 7.5  # within which it has to come to the end of its run
CLEAN_UP_WITHIN_S = 1.5


class Stops:
    """A rank's side.

    The training thread first writes ``step``, then looks for a signal in its beat; the watching one first writes the
    signal, then reads ``step``. So either the former sees the question, or the latter sees the new step.

    SIGTERM and SIGINT are heard while the training thread sits in C++ code, where no Python handler runs: Python's
    C-level handler writes the signal's number into a pipe at once (``signal.set_wakeup_fd``).

    Attributes:
        step: that the training thread is at.
        is_signalled: a number is in the pipe, or was.
        decision: the step at which all do.
    """

    def __init__(self) -> None:
        self.step = 0
        self.is_signalled = False
        self.decision: int | None = None
        self._pipe = (-1, -1)
        self._first = 0.0  # when the first signal came

    def take_signals(self) -> None:
        """Take them over. A signal that is ignored stays so (``nohup``). Main thread only."""
        if self._pipe[0] >= 0 or threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._handle)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        multiprocessing.util.register_after_fork(self, Stops._begin_child)

    def read_signals(self) -> Iterator[tuple[int, bool]]:
        """Those that came since the last time, each with whether it came again: a second or more after the first."""
        with suppress(OSError):  # none, or not taken over
            for signum in os.read(self._pipe[0], 4096):
                now = time.monotonic()
                if signum in _SIGNALS and (self._first == 0.0 or now > self._first + AGAIN_AFTER_S):
                    yield signum, self._first > 0.0
                    self._first = self._first or now

    def restore_signals(self) -> None:
        """Python's own handlers where these are in place. Lightning's Trainer puts back those of before it."""
        if self._pipe[0] < 0:
            return
        for signum, handler in _SIGNALS.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler)
        signal.set_wakeup_fd(-1)
        ends, self._pipe = self._pipe, (-1, -1)
        for end in ends:
            os.close(end)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # As soon as Python runs: a run that ends before the number was read must not end as if none had come.
        self.is_signalled = True

    def _begin_child(self) -> None:
        """A signal to a child of ``multiprocessing`` is not the job's; one to the rank's group is not a loader's.

        torchrun and terminals send to groups. The rank needs batches up to the step where all stop, and torch raises in
        it where a worker is killed.
        """
        self.restore_signals()
        if is_loader_worker():
            os.setpgid(0, 0)
            threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()


def _end_with(parent: int) -> None:
    """SIGKILL to the rank's group does not come here, and a worker whose full pipe nobody reads waits for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class Shutdown:
    """Created by the training thread, to which the first method belongs; the others to a thread beside it.

    Attributes:
        clean_ups: called before a forced end, each in a thread, which may take its time.
        is_handled: it has an error in hand.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.clean_ups: list[Callable[[], object]] = [lambda: print(end="", flush=True)]  # what a user has printed
        self.is_handled = False
        self._error: BaseException | None = None
        self._not_before = self._began = 0.0

    def take_over(self, error: BaseException | None = None, hooks_s: float = 0.0) -> None:
        """The training thread has an exception, and needs no other; it is printed if its end has to be forced.

        A failure does not force it within ``hooks_s`` seconds from now, as users' hooks for exceptions run.
        """
        self.is_handled = True
        self._error = error or self._error
        self._not_before = max(self._not_before, time.monotonic() + hooks_s)

    def due(self) -> bool:
        """Whether the process has to be ended. Called again and again from the failure on."""
        now = time.monotonic()
        if self._began == 0.0:
            self._began = now
            threading.Thread(target=abort_groups, daemon=True).start()  # the training thread may wait for NCCL
        limit = UNWIND_S if self.is_handled else GRACE_S
        return now > self._began + limit and now > self._not_before

    def force(self, code: int, where: str, reason: str) -> None:
        """Say where the training thread is and why it ends, tidy up, and end the process, whatever threads do."""
        faulthandler.dump_traceback(2)
        if self._error is not None:
            write_stderr("".join(traceback.format_exception(self._error)))
        write_stderr(f"lightning-smddp: {where} is ended, exit code {code}. Cause: {reason}\n")
        for clean_up in self.clean_ups:
            thread = threading.Thread(target=clean_up, daemon=True)
            thread.start()
            thread.join(CLEAN_UP_WITHIN_S)
        for child in multiprocessing.active_children():  # an orderly exit ends them, too
            child.kill()
        # At once: `sys.exit` would only end this thread, and an orderly exit waits for threads that may wait for a
        # peer.
        os._exit(code)


def write_stderr(text: str) -> None:
    """To the descriptor, not to ``sys.stderr``, whose lock another thread may hold."""
    with suppress(OSError):  # it is closed, or nobody reads it
        os.write(2, text.encode(errors="replace"))
