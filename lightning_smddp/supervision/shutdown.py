"""How a rank's process ends when its job has: by its training thread if that can, else by force, tidied up."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.supervision.failure import Failure

INTERRUPT_AFTER_S = 0.5  # errors of communication come by themselves within less
GRACE_S = 3.0  # from a failure on, within which the training thread has to raise
UNWIND_S = 8.0  # within which it has to come to the end of its run
CLEAN_UP_WITHIN_S = 1.5


class InterruptionError(RankFailedError):
    """The error that is raised in the training thread; made without arguments there, by a class for each failure."""

    failure: Failure

    def __init__(self) -> None:
        error = self.failure.error()
        super().__init__(error.rank, str(error))


class Shutdown:
    """Created by the training thread, to which the first two methods belong; the others to a thread beside it.

    Attributes:
        hooks_s: how long users' hooks for exceptions may take, on the rank that failed.
        clean_ups: called before a forced end, in threads of their own.
        releases: called once after a failure, in threads: they set free a training thread that waits for a device.
        is_waiting: the training thread waits in the supervisor, which raises there.
        is_handled: it has an error in hand.
    """

    def __init__(self) -> None:
        self.hooks_s = 0.0
        self.thread = threading.get_ident()
        self.clean_ups: list[Callable[[], object]] = [_flush, _kill_workers]
        self.releases: list[Callable[[], object]] = []
        self.is_waiting = self.is_handled = self._is_interrupted = False
        self._error: BaseException | None = None
        self._not_before = self._began = self._waits_since = 0.0

    def take_over(self, error: BaseException | None = None) -> None:
        """The training thread has an exception, and needs no other; it is printed if its end has to be forced.

        One that waits for it already is raised and dropped: if it were withdrawn, by setting none in its place, the
        interpreter would look for it again and again, and Python 3.11 would do nothing else under a profiler.
        """
        self.is_handled = True
        self._error = error or self._error
        with contextlib.suppress(InterruptionError):
            _let_it_come()

    def postpone(self, seconds: float) -> None:
        """No forced end because of a failure within ``seconds`` from now: something is being saved."""
        self._not_before = time.monotonic() + seconds

    def due(self, failure: Failure, first_runs_hooks: bool) -> bool:
        """Whether the process has to be ended. Called again and again from the failure on.

        The training thread is interrupted if it runs Python code, and set free if it waits for a device. The rank that
        failed may be in a hook of the user's, and gloo holds this thread until that has ended: the time to raise counts
        from there.
        """
        now = time.monotonic()
        if self._began == 0.0:
            self._began = self._waits_since = now
        passed = now - self._began
        # The interruption comes before the release: a thread that is set free finds its error waiting. Ranks that have
        # failed alike end by themselves.
        if passed > INTERRUPT_AFTER_S and not self.is_handled and not self._is_interrupted:
            self._is_interrupted = True
            self._interrupt(failure)
        if passed > GRACE_S or self._is_interrupted:
            _run(self.releases)
            self.releases = []
        if self.is_handled:
            return now > max(self._began + UNWIND_S, self._not_before)
        if first_runs_hooks and passed < self.hooks_s:
            self._waits_since = now
        return now > self._waits_since + GRACE_S

    def _interrupt(self, failure: Failure) -> None:
        """Raise in the training thread, if it runs Python code and handles no error yet."""
        current: Any = sys._current_exceptions().get(self.thread)
        if isinstance(current, tuple):  # Python before 3.12: (type, value, traceback)
            current = current[1]
        if current is None and not self.is_waiting:
            attributes = {"failure": failure, "__module__": RankFailedError.__module__}
            error = type("RankFailedError", (InterruptionError,), attributes)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(error))

    def force(self, code: int, where: str, reason: str) -> None:
        """Say where the training thread is and why it ends, tidy up, and end the process, whatever threads do."""
        if self._error is not None:
            say("".join(traceback.format_exception(self._error)))
        else:
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(2, all_threads=True)
        say(f"lightning-smddp: {where} is ended, exit code {code}. Cause: {reason}\n")
        deadline = time.monotonic() + CLEAN_UP_WITHIN_S
        for thread in _run(self.clean_ups):
            thread.join(max(0.0, deadline - time.monotonic()))
        # At once: `sys.exit` would only end this thread, and an orderly exit waits for threads that may wait for a
        # peer.
        os._exit(code)


def _let_it_come() -> None:
    """Where a function begins, the interpreter raises what another thread has set."""


def _run(functions: list[Callable[[], object]]) -> list[threading.Thread]:
    """Each in a thread, as it may take its time."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def say(text: str) -> None:
    """To the descriptor, not to ``sys.stderr``, whose lock another thread may hold."""
    with contextlib.suppress(OSError):  # it is closed, or nobody reads it
        os.write(2, text.encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _kill_workers() -> None:
    """What this process started through ``multiprocessing``: DataLoader workers."""
    for child in multiprocessing.active_children():
        child.kill()
