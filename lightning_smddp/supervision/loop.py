"""One thread that waits for descriptors, timers and calls from other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_Callback = Callable[[], None]


class Timer:
    """A call that is still to come."""

    __slots__ = ("call",)

    def __init__(self, call: _Callback) -> None:
        self.call: _Callback | None = call

    def cancel(self) -> None:
        """Cancel the timer: its call is not made when its time comes."""
        self.call = None


class Loop:
    """``run()`` belongs to one thread, and so do all methods but :meth:`call` and :meth:`stop`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe()  # close-on-exec, as all descriptors of Python
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._calls: deque[_Callback] = deque()
        # A heap by time. Timers of one moment are told apart by a number, as they have no order themselves.
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._stopped = False
        self.watch(self._reader, self._drain)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Have ``function(*args)`` called in the loop's thread; for any thread, also after the end."""
        # First the call, then the byte: `run` takes the bytes out before it looks for calls, so no call waits for a
        # byte that has been read already.
        self._calls.append(lambda: void(function, *args))
        # A full pipe wakes the loop as well; after the end nobody listens.
        with contextlib.suppress(BlockingIOError, OSError):
            if self._writer >= 0:
                os.write(self._writer, b"\0")

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> Timer:
        """Call ``function(*args)`` in so many seconds."""
        timer = Timer(lambda: void(function, *args))
        due = time.monotonic() + seconds
        heapq.heappush(self._timers, (due, next(self._numbers), timer))
        return timer

    def watch(
        self,
        descriptor: int,
        readable: _Callback,
        writable: _Callback | None = None,
    ) -> None:
        """Call ``readable()`` when ``descriptor`` can be read, ``writable()`` when written; replaces what was set."""
        events = selectors.EVENT_READ
        if writable is not None:
            events |= selectors.EVENT_WRITE
        if descriptor in self._selector.get_map():
            self._selector.modify(descriptor, events, (readable, writable))
        else:
            self._selector.register(descriptor, events, (readable, writable))

    def unwatch(self, descriptor: int) -> None:
        """Forget ``descriptor``, before it is closed."""
        with contextlib.suppress(KeyError):  # was not watched
            self._selector.unregister(descriptor)

    def stop(self) -> None:
        """Let ``run`` return after the calls that were made before this one."""
        self.call(setattr, self, "_stopped", True)

    def run(self) -> None:
        """Until :meth:`stop`; exceptions of callbacks come out here."""
        while not self._stopped:
            for key, events in self._selector.select(self._patience()):
                # One that was called just now may have let go of this descriptor, and closed it: the supervisor's
                # listener, say, when the last rank is admitted while a stranger waits.
                if key.fd not in self._selector.get_map():
                    continue
                readable, writable = key.data
                if events & selectors.EVENT_READ:
                    readable()
                if writable is not None and events & selectors.EVENT_WRITE:
                    writable()
            # Also those that calls make: what one of them asks for is done before the loop sleeps again.
            while self._calls:
                call = self._calls.popleft()
                call()
            self._run_timers()

    def _patience(self) -> float | None:
        """For how many seconds to wait for descriptors; None: until one is ready."""
        if self._calls:
            return 0.0
        if not self._timers:
            return None
        due = self._timers[0][0]
        return max(0.0, due - time.monotonic())

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.call is not None:
                timer.call()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def close(self) -> None:
        """Close its descriptors: after ``run``, or in a forked child, where this leaves the parent's loop alone."""
        self._selector.close()
        writer = self._writer
        self._writer = -1
        os.close(writer)
        os.close(self._reader)


def void(function: Callable[..., object], *args: Any) -> None:
    """Call a function whose result is of no use to a loop, which takes callables without result."""
    function(*args)
