"""How a rank's process ends when its job has: by its training thread if that can, else by force, tidied up."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.supervision.failure import Failure
from lightning_smddp.supervision.loop import Loop
from lightning_smddp.supervision.processes import kill_own_workers

INTERRUPT_AFTER_S = 0.5  # errors of communication come by themselves within less
CLEAN_UP_WITHIN_S = 1.0  # each
ALL_CLEAN_UPS_WITHIN_S = 2.5
_LOOK_S = 0.2  # whether others still run hooks


class InterruptionError(RankFailedError):
    """The error that :meth:`Shutdown.interrupt` raises in the training thread; made without arguments there."""

    failure: Failure

    def __init__(self) -> None:
        error = self.failure.error()
        super().__init__(error.rank, str(error))

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made for one failure, so another process does not have it.
        return RankFailedError, (self.rank, str(self))


class Shutdown:
    """Created by the training thread; the methods that say so belong to it, the others to the loop's thread.

    Args:
        loop: of the watching thread.
        where: this rank, step and phase, for the last line.
        is_waiting: whether the training thread waits in the supervisor, which raises there.
        others_run_hooks: whether this rank's end could cut off hooks of the user's that other ranks run for a failure.

    Attributes:
        hooks_s: how long such hooks may take.
    """

    def __init__(
        self,
        loop: Loop,
        where: Callable[[], str],
        is_waiting: Callable[[], bool],
        others_run_hooks: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = loop
        self._where = where
        self._is_waiting = is_waiting
        self._others_run_hooks = others_run_hooks
        self.hooks_s = self._hooks_until = 0.0
        self._thread = threading.get_ident()
        self._not_before = 0.0
        self.clean_ups: list[Callable[[], object]] = [kill_own_workers]
        self.releases: list[Callable[[], object]] = []  # set free who waits for a device
        self.error: BaseException | None = None  # that the training thread has in hand
        self.is_handled = False  # it has one
        self.is_over = False  # it has closed the supervisor: it ends, or goes on, as it likes

    # ---- for the training thread ----

    def take_over(self, error: BaseException | None = None) -> None:
        """The training thread has an exception, and needs no other; it is printed if its end has to be forced.

        One that waits for it already is raised and dropped: if it were withdrawn, by setting none in its place, the
        interpreter would look for it again and again, and Python 3.11 would do nothing else under a profiler.
        """
        self.is_handled = True
        self.error = error or self.error
        with contextlib.suppress(InterruptionError):
            _let_it_come()

    def postpone(self, seconds: float) -> None:
        """No forced end within ``seconds`` from now."""
        self._not_before = time.monotonic() + seconds

    @property
    def postponed_s(self) -> float:
        """For how long it still is; 0 if it is not."""
        return max(0.0, self._not_before - time.monotonic())

    # ---- for the loop's thread ----

    def after_failure(
        self,
        failure: Failure,
        code: Callable[[], int],
        grace: float,
        unwind: float,
    ) -> None:
        """Leave the training thread ``grace`` seconds to raise, and ``unwind`` to let go; then end the process.

        The rank that failed may be in a hook of the user's, and gloo holds this thread until that has ended. So it has
        ``grace`` seconds again behind the hooks of others.
        """
        # The interruption comes before the release: a training thread that is set free finds its error waiting.
        interrupt_after = min(INTERRUPT_AFTER_S, grace)
        self._loop.later(interrupt_after, self.interrupt, failure)
        self._loop.later(interrupt_after, self._release_unhandled)
        self._loop.later(grace, self._release)
        self._hooks_until = time.monotonic() + self.hooks_s
        force = functools.partial(self._force_when_due, code, failure.describe())
        self._loop.later(grace, self._force_if_stuck, grace, unwind, force)

    def interrupt(self, failure: Failure) -> bool:
        """Raise in the training thread, if it runs Python code and handles no error yet; whether it was tried."""
        if self.is_handled or self.is_over or self._is_waiting() or _handles_an_exception(self._thread):
            return False
        if self._thread not in sys._current_frames():
            return False
        # The interpreter is given a class, and makes the object in the other thread, without arguments: so each failure
        # has a class of its own, which knows it.
        attributes = {"failure": failure, "__module__": RankFailedError.__module__}
        error = type("RankFailedError", (InterruptionError,), attributes)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(error))
        return True

    def _release_unhandled(self) -> None:
        """Not where the training thread has an error in hand: ranks that have failed alike end by themselves."""
        if not self.is_handled:
            self._release()

    def _release(self) -> None:
        """Set free a training thread that waits for a device; it has its error by then, or :meth:`interrupt`'s comes.

        Once, and in a thread, as this may take its time.
        """
        if self.is_over:
            return
        releases = self.releases
        self.releases = []
        for release in releases:
            thread = threading.Thread(
                target=_run_guarded,
                args=(release,),
                name="smddp-release",
                daemon=True,
            )
            thread.start()

    def _force_if_stuck(self, grace: float, unwind: float, force: Callable[[], None]) -> None:
        if self.is_handled:
            self._loop.later(max(0.0, unwind - grace), force)
        elif self._must_wait_for_hooks():
            self._wait_for_hooks(grace, unwind, force)
        else:
            force()

    def _wait_for_hooks(self, grace: float, unwind: float, force: Callable[[], None]) -> None:
        if self._must_wait_for_hooks():
            self._loop.later(_LOOK_S, self._wait_for_hooks, grace, unwind, force)
        else:
            self._loop.later(grace, self._force_if_stuck, grace, unwind, force)

    def _must_wait_for_hooks(self) -> bool:
        return time.monotonic() < self._hooks_until and not self.is_handled and self._others_run_hooks()

    def _force_when_due(self, code: Callable[[], int], line: str) -> None:
        if self.is_over:
            return
        if self.postponed_s > 0:
            self._loop.later(self.postponed_s, self._force_when_due, code, line)
        else:
            self.force(code(), line)

    def force(self, code: int, reason: str) -> None:
        """Say why in one line, tidy up, and end the process, whatever its other threads do."""
        if self.error is not None:
            write_to_stderr("".join(traceback.format_exception(self.error)))
        cause = " ".join(reason.split())
        write_to_stderr(f"lightning-smddp: {self._where()} is ended, exit code {code}. Cause: {cause}\n")
        deadline = time.monotonic() + ALL_CLEAN_UPS_WITHIN_S
        for clean_up in [_flush, *reversed(self.clean_ups)]:
            thread = threading.Thread(target=_run_guarded, args=(clean_up,), daemon=True)
            thread.start()
            left_s = deadline - time.monotonic()
            thread.join(max(0.05, min(CLEAN_UP_WITHIN_S, left_s)))
        # At once: `sys.exit` would only end this thread, and an orderly exit waits for threads that may wait for a
        # peer.
        os._exit(code)


def _let_it_come() -> None:
    """Where a function begins, the interpreter raises what another thread has set."""


def _run_guarded(clean_up: Callable[[], object]) -> None:
    try:
        clean_up()
    except Exception as error:  # the process ends in any case, and the next clean-up has its turn
        write_to_stderr(f"lightning-smddp: {clean_up!r} failed: {error!r}\n")


def write_to_stderr(text: str) -> None:
    """To the descriptor, not to ``sys.stderr``, whose lock another thread may hold."""
    with contextlib.suppress(OSError):  # it is closed, or nobody reads it
        os.write(2, text.encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _handles_an_exception(thread: int) -> bool:
    current: Any = sys._current_exceptions().get(thread)
    if isinstance(current, tuple):  # Python before 3.12: (type, value, traceback)
        current = current[1]
    return current is not None
