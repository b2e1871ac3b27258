"""Who waits for whom: found out from how far all ranks have come, and what each one's training thread does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lightning_smddp.supervision.board import Beat

# Modules whose functions wait for other ranks: torch's collectives, DDP's backward pass, and this package.
_COMMUNICATE = ("torch.distributed", "torch.nn.parallel", "torch.autograd.graph", "lightning_smddp")
# The phases in the order in which a step comes to them. Other ones count as later than all of these.
_ORDER = ["", "setup", "forward", "backward", "optimizer", "data", "validation", "checkpoint"]
NO_RANK_IS_BEHIND = "no rank is behind on its host (NCCL's flight recorder says more: TORCH_FR_BUFFER_SIZE=2000)"


def behind(beats: Sequence[Beat]) -> int | None:
    """The rank that the others wait for: who does not wait itself, else who is least far; None if all are as far."""
    places = [(beat.step, [*_ORDER, beat.phase].index(beat.phase)) for beat in beats]
    chosen = [rank for rank, beat in enumerate(beats) if not beat.waits] or range(len(beats))
    late = min(chosen, key=places.__getitem__)
    if len(chosen) == len(beats) and places[late] == max(places):
        return None
    return late


def waited_for(beats: Sequence[Beat], seconds: float) -> int | None:
    """The one rank that all others have waited for so long; None if there is none."""
    free = [rank for rank, beat in enumerate(beats) if not beat.waits]
    waits = [beat.still_s for beat in beats if beat.waits]
    if len(free) != 1 or not waits or min(waits) < seconds:
        return None
    return free[0]


class Stillness:
    """For how long a rank does not move, and what it waits for. Belongs to the watching thread.

    Args:
        thread: the training thread.

    Attributes:
        has_work: asks the rank's device whether it has; None: there is none.
        ask_after_s: without a move, before the device is asked: a stream must not be while a graph is captured from it.
        waits: ``"communication"``: its training thread waits for other ranks; ``"device"``: it does not, and its device
            has had work left for long; else empty.
        still_s: seconds since it has moved, or begun to wait.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self.has_work: Callable[[], bool] | None = None
        self.ask_after_s = 60.0
        self.still_s = 0.0
        self.waits = ""
        self._place: tuple[object, ...] = ()

    def tick(self, place: tuple[object, ...], seconds: float, waits: bool) -> None:
        """So much time has gone by, and the rank is at ``place``; ``waits``: for others, as the supervisor knows."""
        frame = sys._current_frames().get(self._thread)  # None if the thread has ended
        found = ""
        if waits or (frame is not None and frame.f_globals.get("__name__", "").startswith(_COMMUNICATE)):
            found = "communication"
        elif place == self._place and (self.waits == "device" or self.still_s >= self.ask_after_s):
            found = "device" if self.has_work is not None and self.has_work() else ""
        self.still_s += seconds
        if (place, found) != (self._place, self.waits):
            self.still_s = 0.0
        self._place, self.waits = place, found
