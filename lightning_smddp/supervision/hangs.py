"""Who waits for whom: found out from how far all ranks have come, and what each one's training thread does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Modules whose functions wait for other ranks: torch's collectives, DDP's backward pass, and this package.
_COMMUNICATE = ("torch.distributed", "torch.nn.parallel", "torch.autograd.graph", "lightning_smddp")
# The phases in the order in which a step comes to them. Other ones count as later than all of these.
_ORDER = ("", "setup", "forward", "backward", "optimizer", "data", "validation", "checkpoint")
NO_RANK_IS_BEHIND = (
    "no rank is behind on its host. With NCCL its flight recorder says which collective does not end: set "
    "TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1"
)
CURE = (
    "Give every rank the same number of batches: equally many samples, or `drop_last=True`. If code of yours sets "
    "`trainer.should_stop`, all ranks have to: `trainer.strategy.reduce_boolean_decision(stop, all=False)`."
)
# By what a rank waits for itself.
WHY_LATE = {
    "": "it is its host that does not go on",
    "device": "its device has work left",
    "communication": "it waits for others, too",
}


class Beat(NamedTuple):
    """How far a rank is, as it says twice a second. Travels as JSON: a list of the attributes.

    Attributes:
        number: of this beat.
        step, phase, batches: see ``Supervisor``.
        ended, ended_batches: how many epochs it has ended, and after how many batches the last one.
        still_s: seconds since it has moved, by its own clock.
        waits: ``"communication"``: its training thread waits for other ranks; ``"device"``: it does not, and its device
            has had work left for long; else empty.
        answer: see ``StopGate.first``.
        knows: of the failure.
        over: 1: its run is over; 2: it uses the store no more, or takes it away.
    """

    number: int
    step: int
    phase: str
    batches: int
    ended: int
    ended_batches: int
    still_s: float
    waits: str
    answer: int | None
    knows: bool
    over: int

    @property
    def place(self) -> tuple[int, int]:
        """For the order in which ranks come along."""
        order = len(_ORDER)
        if self.phase in _ORDER:
            order = _ORDER.index(self.phase)
        return self.step, order

    def begun_beyond(self, end: int, batches: int, validates: bool) -> int:
        """How many batches it has begun of an epoch that has ended elsewhere after ``batches``; 0: it may end as well.

        That is the rank's ``end``-th epoch. ``validates``: those who have ended are about to, so nobody can yet.
        """
        if self.ended == end and self.ended_batches > batches:
            return self.ended_batches
        goes_on = self.batches > batches
        if validates and self.phase == "validation":
            goes_on = self.batches >= batches
        if self.ended == end - 1 and goes_on:
            return self.batches
        return 0


def behind(beats: Sequence[Beat]) -> int | None:
    """The rank that the others wait for: who does not wait itself, else who is least far; None if all are as far."""
    ranks = range(len(beats))
    chosen = [rank for rank in ranks if not beats[rank].waits] or ranks
    late = min(chosen, key=lambda rank: beats[rank].place)
    if len(chosen) == len(beats) and beats[late].place == max(beat.place for beat in beats):
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
        has_work: asks the rank's device whether it has; None: there is none. It may block where the device hangs, so a
            thread asks that nobody waits for.
        ask_after_s: without a move, before the device is asked: a stream must not be while a graph is captured from it.
        still_s: seconds since the last move.
        waited_s: seconds that it has waited.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self.has_work: Callable[[], bool] | None = None
        self.ask_after_s = 60.0
        self.still_s = self.waited_s = 0.0
        self.waits = ""
        self._place: tuple[object, ...] = ()
        self._answers: list[bool] = []
        self._asking = threading.Thread()

    def tick(self, place: tuple[object, ...], seconds: float, waits: bool) -> None:
        """So much time has gone by, and the rank is at ``place``; ``waits``: for others, as the supervisor knows."""
        self.still_s += seconds
        self.waited_s += seconds
        if place != self._place:
            self._place = place
            self.still_s = 0.0
        frame = sys._current_frames().get(self._thread)  # None if the thread has ended
        self.waits = ""
        if waits or (frame is not None and frame.f_globals.get("__name__", "").startswith(_COMMUNICATE)):
            self.waits = "communication"
        elif self.still_s > self.ask_after_s and self._device_is_busy():
            self.waits = "device"
        if not self.waits or self.still_s == 0.0:
            self.waited_s = 0.0

    def _device_is_busy(self) -> bool:
        """As it was answered last; as long as there is no answer, it is."""
        has_work = self.has_work
        if has_work is None or self._asking.is_alive():
            return has_work is not None
        busy = self._answers[-1:] == [True]
        self._asking = threading.Thread(target=lambda: self._answers.append(has_work()), daemon=True)
        self._asking.start()
        return busy
