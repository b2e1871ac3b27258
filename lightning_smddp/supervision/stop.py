"""Stopping all ranks at one step, without a message per step, and hearing the signals that ask for it.

Once a stop is asked for, each rank's watching thread answers with the first step at which its training thread can still
stop, and from then on that thread waits in ``gate()`` at this step. The largest answer is the step at which all stop:
nobody is beyond it, and the ones before it go on until they come to it. The answers come from threads that no
collective blocks, so this cannot deadlock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

ALONE = -1  # a decision: some rank does not answer, and each stops where it is
AGAIN_AFTER_S = 1.0  # a launcher may pass on what the terminal has sent to everyone
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopGate:
    """A rank's side.

    The training thread first writes ``step``, then looks at ``attention``; the watching one first writes ``attention``,
    then reads ``step``. So either the former sees the question, or the latter sees the new step.
    """

    def __init__(self) -> None:
        self.step = -1
        self.attention = False  # there is a failure or a request to stop
        self.first: int | None = None  # this rank's answer: the first step at which it can stop
        self.decision: int | None = None

    def attend(self) -> None:
        """From here on the training thread waits at each step until it is known whether to stop there."""
        self.attention = True

    def answer(self) -> None:
        """For the watching thread."""
        self.attention = True
        if self.first is None:
            # The training thread may have passed the gate of `step` already, without a look at this.
            self.first = self.step + 1

    def may_pass(self, step: int) -> bool:
        """Whether the training thread need not wait at ``step``."""
        return self.decision is not None or (self.first is not None and step < self.first)

    def verdict(self, step: int) -> Literal["agreed", "alone"] | None:
        """Whether to stop at ``step``, and whether all ranks do; if not, a collective would hang."""
        if self.decision == ALONE or not self.may_pass(step):
            return "alone"
        if self.decision is None or step < self.decision:
            return None
        return "agreed"


class Signals:
    """Hears SIGTERM and SIGINT while the training thread sits in C++ code, where no Python handler runs.

    Python's C-level handler writes the signal's number into a pipe at once (``signal.set_wakeup_fd``).

    Args:
        heard: called on the main thread as soon as it runs Python code again.
    """

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1
        self._pipe = (-1, -1)
        self._first = 0.0  # when it came

    def take(self) -> None:
        """Take them over until :meth:`restore`. A signal that is ignored stays so (``nohup``). Main thread only."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)
        self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def wait(self, seconds: float, closed: threading.Event) -> bool:
        """Wait for a signal, or until ``closed``, for ``seconds`` at most; whether ``closed`` is set."""
        end = self._pipe[0]
        if end < 0:
            return closed.wait(seconds)
        heard = select.poll()
        heard.register(end, select.POLLIN)
        heard.poll(1000 * seconds)
        return closed.is_set()

    def read(self) -> list[tuple[int, bool]]:
        """Those that came since the last time, each with whether it came again: a second or more after the first."""
        came: list[tuple[int, bool]] = []
        with contextlib.suppress(OSError):  # none, or not taken over
            for signum in os.read(self._pipe[0], 4096):
                now = time.monotonic()
                if signum in self._previous and (self._first == 0.0 or now > self._first + AGAIN_AFTER_S):
                    came.append((signum, self._first > 0.0))
                    self._first = self._first or now
        return came

    def restore(self) -> None:
        """Put back what was there before, except what somebody else has replaced since. Main thread only.

        Also in a forked child, such as a DataLoader worker: a SIGTERM to that one is not the job's.
        """
        if not self._previous or threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler or signal.SIG_DFL)  # None: one that was not set from Python
        self._previous = {}
        with contextlib.suppress(ValueError, OSError):  # the one before was closed meanwhile
            signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._previous_wakeup)
        ends, self._pipe = self._pipe, (-1, -1)
        with contextlib.suppress(OSError):  # full: it is read then
            os.write(ends[1], b"\0")  # whoever waits for it goes on
        for end in ends:
            os.close(end)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._heard()
