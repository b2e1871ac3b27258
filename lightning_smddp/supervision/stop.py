"""Stopping all ranks at one step, without a message per step, and hearing the signals that ask for it.

Once a stop is asked for, each rank's watching thread answers with the first step at which its training thread can still
stop, and from then on that thread waits in ``gate()`` at this step. The largest answer is the step at which all stop:
nobody is beyond it, and the ones before it go on until they come to it. The answers come from threads that no
collective blocks, so this cannot deadlock.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any

from lightning_smddp._compat.torch import is_loader_worker

END = 2**62  # a place to stop at, behind all others
AGAIN_AFTER_S = 1.0  # a launcher may pass on what the terminal has sent to everyone
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stops:
    """A rank's side.

    The training thread first writes ``step``, then looks at ``attention``; the watching one first writes ``attention``,
    then reads ``step``. So either the former sees the question, or the latter sees the new step.

    SIGTERM and SIGINT are heard while the training thread sits in C++ code, where no Python handler runs: Python's
    C-level handler writes the signal's number into a pipe at once (``signal.set_wakeup_fd``).

    Attributes:
        step: that the training thread is at.
        attention: there is a failure or a request to stop, which the training thread has to wait for.
        answer: the first step at which this rank can stop.
        decision: the step at which all do.
    """

    def __init__(self) -> None:
        self.step = -1
        self.attention = False
        self.answer: int | None = None
        self.decision: int | None = None
        self._handlers: dict[int, Any] = {}  # those of before
        self._wakeup = -1
        self._pipe = (-1, -1)
        self._first = 0.0  # when the first signal came

    def ask(self) -> None:
        """For the watching thread."""
        self.attention = True
        if self.answer is None:
            # The training thread may have passed the gate of `step` already, without a look at this.
            self.answer = min(self.step + 1, END)

    def may_pass(self, step: int) -> bool:
        """Whether the training thread need not wait at ``step``."""
        return self.decision is not None or (self.answer is not None and step < self.answer)

    # ---- signals ----

    def take_signals(self) -> None:
        """Take them over. A signal that is ignored stays so (``nohup``). Main thread only."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._handlers[signum] = signal.signal(signum, self._handle)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        register_after_fork(self, _leave_group)

    def read_signals(self) -> list[tuple[int, bool]]:
        """Those that came since the last time, each with whether it came again: a second or more after the first."""
        came: list[tuple[int, bool]] = []
        with suppress(OSError):  # none, or not taken over
            for signum in os.read(self._pipe[0], 4096):
                now = time.monotonic()
                if signum in self._handlers and (self._first == 0.0 or now > self._first + AGAIN_AFTER_S):
                    came.append((signum, self._first > 0.0))
                    self._first = self._first or now
        return came

    def restore_signals(self) -> None:
        """Put back what was there before, except what somebody else has replaced since. Main thread only.

        Also in a forked child, such as a DataLoader worker: a SIGTERM to that one is not the job's.
        """
        if not self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler or signal.SIG_DFL)  # None: one that was not set from Python
        self._handlers = {}
        with suppress(ValueError, OSError):  # the one before was closed meanwhile
            signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._wakeup)
        ends, self._pipe = self._pipe, (-1, -1)
        for end in ends:
            os.close(end)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # As soon as Python runs: a run that ends before the number was read must not end as if none had come.
        self.attention = True
        if self._first == 0.0:  # not read yet, or somebody has replaced the wakeup descriptor, such as asyncio
            with suppress(OSError):  # full: it is read then
                os.write(self._pipe[1], bytes([signum]))


def _leave_group(stops: Stops) -> None:
    """In a child: torchrun and terminals send to a rank's whole process group.

    The rank needs batches up to the step where all stop, and torch raises in it where a worker is killed.
    """
    if is_loader_worker():
        os.setpgid(0, 0)
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """SIGKILL to the rank's group does not come here, and a worker whose full pipe nobody reads waits for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        time.sleep(1.0)
    os._exit(1)
