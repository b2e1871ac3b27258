"""Hangs of devices: NCCL raises nothing, so who waits for whom is found out from how far all ranks have come.

Two conditions make a hang, of which the first is each rank's to find out (:class:`DeviceStillness`), and the second the
hub's (:class:`HangRule`):

- A rank *waits* if for ``collective_timeout`` its host has not moved, and either its device has not, with work left, or
  its host sits in a collective itself (of gloo). A rank that compiles, saves, loads data or runs a user's hook leaves
  nothing to do on its device after a moment: it does not wait, however long it takes.
- Some rank waits, and no rank has moved for ``collective_timeout``. A rank that does move, as in a validation of its
  own, gets ``LENIENCY_S`` more; then NCCL's own limit would end the process that waits, without a word of who is late.

The one *behind* is the cause: it does not wait where others do; else its device is in an earlier step, or computes
where others' devices communicate, or is in an earlier phase.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from lightning_smddp.supervision.peer import Peer
from lightning_smddp.supervision.progress import DevicePoint, Progress, Reading, place

LENIENCY_S = 30.0
_QUIET_PERIODS = 2  # without a move of the host, before its device is looked at
# The phases in the order in which a step comes to them. Other ones count as later than all of these.
_ORDER = ("", "setup", "forward", "backward", "communication", "optimizer", "data", "validation", "checkpoint")


class Device(Protocol):
    """What the watching thread asks of a device; must not block."""

    def look(self) -> int | None:
        """A number that is the same as long as the device is at one point; None: all that was launched is done."""
        ...

    def where(self) -> DevicePoint | None:
        """The last mark that it has passed."""
        ...


class DeviceStillness:
    """For how long this rank waits. Belongs to the watching thread.

    Args:
        progress: of this rank.
        device: of this rank.
        period: seconds between ticks.
        in_collective: whether the training thread is in one.
    """

    def __init__(
        self, progress: Progress, device: Device, period: float, in_collective: Callable[[], bool] = lambda: False
    ) -> None:
        self._progress = progress
        self._device = device
        self._quiet_s = _QUIET_PERIODS * period
        self._in_collective = in_collective
        self._moves = -1
        self._still_s = 0.0
        self._point: int | None = None
        self._host_was = False  # in a collective, at the last tick
        self._waited_s = 0.0

    def tick(self, seconds: float) -> None:
        """So much time has gone by."""
        moves = self._progress.moves
        if moves != self._moves:
            self._moves = moves
            self._still_s = 0.0
            self._point = None
            self._host_was = False
        self._still_s += seconds
        # A host that goes on needs no look at its device. Behind a quiet while two looks tell: the device is where it
        # was at the last tick, or the training thread is in a collective still.
        point = None
        host_is = False
        if self._still_s > self._quiet_s:
            point = self._device.look()
            host_is = self._in_collective()
        device_waits = point is not None and point == self._point
        host_waits = host_is and self._host_was
        self._point = point
        self._host_was = host_is
        here = None
        if device_waits:
            here = self._device.where()
        elif host_waits:  # the device has done all
            here = DevicePoint(max(self._progress.step, 0), self._progress.phase, 0, True)
        if device_waits or host_waits:
            self._waited_s += seconds
        else:
            self._waited_s = 0.0
        self._progress.waits(self._waited_s, here)


def in_collective(thread: int) -> bool:
    """Whether ``thread`` is in a function of ``torch.distributed``, and so in one that waits for other ranks."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"


class HangRule:
    """Belongs to the hub's thread.

    Args:
        limit: ``collective_timeout``, in seconds.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._moves: dict[int, int] = {}  # of each rank, at the last tick
        self._still_s: dict[int, float] = {}  # of each rank: how long that number has been the same

    def tick(self, peers: Iterable[Peer], seconds: float) -> tuple[Peer, Reading, str] | None:
        """So much time has gone by. If there is a hang: who is behind, where, and what is known of it."""
        present = [peer for peer in peers if peer.is_in_run]
        readings: dict[int, Reading] = {}
        allowed_s = self._limit
        for peer in present:
            rank = peer.rank
            reading = peer.progress.read()
            readings[rank] = reading
            if self._moves.get(rank) == reading.moves:
                self._still_s[rank] += seconds
            else:
                self._moves[rank] = reading.moves
                self._still_s[rank] = 0.0
            if self._still_s[rank] < self._limit:
                allowed_s = self._limit + LENIENCY_S
        waited = [reading.waited_s for reading in readings.values()]
        if max(waited, default=0.0) < allowed_s or len(present) == 1:
            return None
        return _judge(present, readings)


def _judge(present: Sequence[Peer], readings: dict[int, Reading]) -> tuple[Peer, Reading, str]:
    """What :meth:`HangRule.tick` returns, of at least two ranks, of which at least one waits."""
    late = _behind(present, readings)
    # Never empty: a rank that waits is late only where all others wait as well.
    waiting = [peer for peer in present if peer is not late and readings[peer.rank].waited_s > 0]
    by = max(waiting, key=lambda peer: readings[peer.rank].waited_s)
    at = readings[by.rank]
    if late is None:
        return by, at, f"it has waited for {at.waited_s:.0f} s; no rank is behind: all are at the same point"
    text = f"{by.name} waited for it for {at.waited_s:.0f} s"
    if at.step >= 0:
        text += place(at.step, at.phase)
    reading = readings[late.rank]
    if reading.waited_s == 0:
        return late, reading, f"{text}; its device has nothing left to do, it is its host that does not go on"
    point = reading.device
    if point is None:
        return late, reading, f"{text}; its device has not passed any mark"
    # Of a rank that waits the device tells more than the host, which runs ahead of it.
    where = Reading(point.step, point.phase)
    if point.communicates:
        return late, where, f"{text}; its device waits for others, too"
    return late, where, f"{text}; its device computes and does not come to an end"


def _behind(present: Sequence[Peer], readings: dict[int, Reading]) -> Peer | None:
    """Who is waited for; None if that cannot be told."""
    # Who waits is not who is waited for. If some ranks do not wait, it is the one of these that is least far; if all
    # do, the one whose device has passed the fewest marks; if all are as far, nobody can be named.
    elsewhere = [peer for peer in present if readings[peer.rank].waited_s == 0]
    if elsewhere:
        return min(elsewhere, key=lambda peer: _order(readings[peer.rank]))
    orders = {peer.rank: _device_order(readings[peer.rank]) for peer in present}
    if min(orders.values()) == max(orders.values()):
        return None
    return min(present, key=lambda peer: orders[peer.rank])


def _device_order(reading: Reading) -> tuple[int, bool, int, int]:
    """Sorts devices by how far they are; the least far one is waited for."""
    point = reading.device
    if point is None:
        return (-1, False, 0, 0)
    step, phase = _order(point)
    # Within a step who computes is before all who communicate, as those may wait for it. How many marks of this phase
    # a device has passed tells only computing ones apart.
    if point.communicates:
        return (step, True, phase, 0)
    return (step, False, phase, point.count)


def _order(at: Reading | DevicePoint) -> tuple[int, int]:
    if at.phase not in _ORDER:
        return (at.step, len(_ORDER))
    return (at.step, _ORDER.index(at.phase))
