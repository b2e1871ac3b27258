"""Hearing SIGTERM and SIGINT while the training thread sits in C++ code, where no Python handler runs.

Python's C-level handler writes the signal's number into a descriptor at once (``signal.set_wakeup_fd``); the watching
thread reads it there. The handler at Python level only counts, in case another library takes the descriptor over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from lightning_smddp.supervision.loop import Loop

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Signals:
    """Reports signals to the loop's thread from construction until :meth:`restore`. For the main thread.

    A signal that is ignored stays so (``nohup``, background jobs). A wakeup descriptor that was set before, as by
    asyncio, goes on to receive every signal.

    Args:
        loop: of the watching thread, not yet running or through ``loop.call``.
        on_signal: called there with the number, once for each signal that came.
        signums: which ones.

    Raises:
        ValueError: this is not the main thread.
    """

    def __init__(
        self,
        loop: Loop,
        on_signal: Callable[[int], None],
        signums: Iterable[int],
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("Signals can be watched from the main thread only. Call `Trainer.fit` there.")
        self._loop = loop
        self._on_signal = on_signal
        self._written: Counter[int] = Counter()
        self._handled: Counter[int] = Counter()
        self._reported: Counter[int] = Counter()
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        # Two ways, as each has a gap: Python runs a handler only between bytecodes of the main thread, which may be in
        # gloo for long; the byte is written at once by C, but gets lost where somebody sets another descriptor.
        # `_report` counts.
        loop.call(loop.watch, self._reader, self._read)
        self._previous: dict[int, _Handler] = {}
        for signum in signums:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def restore(self) -> None:
        """Put back what was there before, except what somebody else has replaced since. For the main thread.

        Afterwards :meth:`close` the descriptors in the loop's thread or after its end.
        """
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) != self._handle:
                continue
            if previous is None:  # one that was not set from Python, and cannot be set again
                previous = signal.SIG_DFL
            signal.signal(signum, previous)
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor == self._writer:
            descriptor = self._previous_wakeup
        if descriptor >= 0:
            with contextlib.suppress(ValueError, OSError):  # closed meanwhile
                signal.set_wakeup_fd(descriptor)

    def close(self, watched: bool = True) -> None:
        """Close the descriptors; ``watched``: the loop is still open."""
        if watched:
            self._loop.unwatch(self._reader)
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._handled[signum] += 1
        self._loop.call(self._report, signum)

    def _read(self) -> None:
        try:
            data = os.read(self._reader, 4096)
        except BlockingIOError:
            return
        if self._previous_wakeup >= 0:
            with contextlib.suppress(OSError):  # full, or closed meanwhile: its owner's concern
                os.write(self._previous_wakeup, data)
        for signum in data:
            if signum in self._previous:
                self._written[signum] += 1
                self._report(signum)

    def _report(self, signum: int) -> None:
        """Each signal is seen once or twice: by its byte, by its handler. The larger count is how many came."""
        came = max(self._written[signum], self._handled[signum])
        while self._reported[signum] < came:
            self._reported[signum] += 1
            self._on_signal(signum)
