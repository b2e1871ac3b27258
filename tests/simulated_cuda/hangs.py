"""What to say when the host waits for a stream that does not come to an end."""

from __future__ import annotations

import sys
import threading
import traceback

from tests.simulated_cuda.watchdog import watchdog

limit_s = 30.0  # as in device.cpp


class SimulatedHangError(RuntimeError):
    """A real device would let the host wait forever."""


def report(streams: str) -> None:
    """The device's callback: raise in the waiting thread, with what the streams are at and what each thread does."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    failed = "".join(f"{error}\n" for error in watchdog.errors())
    raise SimulatedHangError(
        "The host waits for the device, which waits for something that does not come.\n"
        + failed
        + streams
        + "\n".join(stacks)
    )
