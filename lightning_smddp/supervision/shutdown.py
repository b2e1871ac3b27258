"""How a rank's process ends when its job has: by its training thread if that can, else by force, tidied up.

That thread gets an error from a collective that breaks, or at the next place where it looks for a failure.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from lightning_smddp.communication.groups import abort_groups

RELEASE_AFTER_S = 0.5  # errors of communication come by themselves within less
GRACE_S = 3.0  # from a failure on, within which the training thread has to raise
UNWIND_S = 8.0  # within which it has to come to the end of its run
CLEAN_UP_WITHIN_S = 1.5


class Shutdown:
    """Created by the training thread, to which the first two methods belong; the others to a thread beside it.

    Attributes:
        clean_ups: called before a forced end, in threads of their own.
        is_handled: it has an error in hand.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.clean_ups: list[Callable[[], object]] = [_flush, _kill_workers]
        self.is_handled = self._is_released = False
        self._error: BaseException | None = None
        self._not_before = self._began = 0.0

    def take_over(self, error: BaseException | None = None) -> None:
        """The training thread has an exception, and needs no other; it is printed if its end has to be forced."""
        self.is_handled = True
        self._error = error or self._error

    def postpone(self, seconds: float) -> None:
        """No forced end because of a failure within ``seconds`` from now: users' hooks for exceptions run."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    def due(self) -> bool:
        """Whether the process has to be ended. Called again and again from the failure on.

        The training thread is set free if it waits for NCCL.
        """
        self._began = self._began or time.monotonic()
        passed = time.monotonic() - self._began
        if passed > RELEASE_AFTER_S and not self._is_released:
            self._is_released = True
            _run([abort_groups])
        limit = UNWIND_S if self.is_handled else GRACE_S
        return passed > limit and time.monotonic() > self._not_before

    def force(self, code: int, where: str, reason: str) -> None:
        """Say where the training thread is and why it ends, tidy up, and end the process, whatever threads do."""
        if self._error is not None:
            say("".join(traceback.format_exception(self._error)))
        else:
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback(2, all_threads=True)
        say(f"lightning-smddp: {where} is ended, exit code {code}. Cause: {reason}\n")
        deadline = time.monotonic() + CLEAN_UP_WITHIN_S
        for thread in _run(self.clean_ups):
            thread.join(max(0.0, deadline - time.monotonic()))
        # At once: `sys.exit` would only end this thread, and an orderly exit waits for threads that may wait for a
        # peer.
        os._exit(code)


def _run(functions: list[Callable[[], object]]) -> list[threading.Thread]:
    """Each in a thread, as it may take its time."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def say(text: str) -> None:
    """To the descriptor, not to ``sys.stderr``, whose lock another thread may hold."""
    with suppress(OSError):  # it is closed, or nobody reads it
        os.write(2, text.encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):  # those of the end: users replace them; None is a closed one
        if stream is not None:
            stream.flush()


def _kill_workers() -> None:
    """What this process started through ``multiprocessing``: DataLoader workers."""
    for child in multiprocessing.active_children():
        child.kill()
