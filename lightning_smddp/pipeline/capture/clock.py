"""How long parts of a step take, whatever else runs on the machine."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class Instant(NamedTuple):
    """A moment: seconds by the clock, and of the processor time that this process has had."""

    wall: float
    processor: float

    def until(self, end: Instant) -> float:
        """Seconds to ``end`` without those in which other processes had the processor.

        Threads of this process that work at the same time make its processor time longer than that by the clock.
        """
        return min(end.wall - self.wall, end.processor - self.processor)


class Clock:
    """Tells moments of work on ``device``. Of a device's work the host's processor time says nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Instant:
        """The moment at which the host is; a device may be behind it."""
        wall = time.perf_counter()
        if self._device.type == "cpu":
            return Instant(wall, time.process_time())
        return Instant(wall, wall)

    def now(self) -> Instant:
        """When the device has done what it was given so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self.read()
