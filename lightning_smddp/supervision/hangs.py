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
from lightning_smddp.supervision.progress import DevicePoint, Progress, Reading

LENIENCY_S = 30.0
_QUIET_PERIODS = 2  # without a move of the host, before its device is looked at
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
        self._progress, self._device, self._quiet_s = progress, device, _QUIET_PERIODS * period
        self._in_collective = in_collective
        self._moves, self._still_s = -1, 0.0
        self._point: int | None = None
        self._host_was = False  # in a collective, at the last tick
        self._waited_s = 0.0

    def tick(self, seconds: float) -> None:
        """So much time has gone by."""
        moves = self._progress.moves
        if moves != self._moves:
            self._moves, self._still_s, self._point, self._host_was = moves, 0.0, None, False
        self._still_s += seconds
        # A host that goes on needs no look at its device. Behind a quiet while two looks tell: the device is where it
        # was at the last tick, or the training thread is in a collective still.
        is_quiet = self._still_s > self._quiet_s
        point = self._device.look() if is_quiet else None
        host_is = is_quiet and self._in_collective()
        device_waits = point is not None and point == self._point
        waits = device_waits or (host_is and self._host_was)
        self._point, self._host_was = point, host_is
        self._waited_s = self._waited_s + seconds if waits else 0.0
        here = None
        if device_waits:
            here = self._device.where()
        elif waits:  # the device has done all
            here = DevicePoint(max(self._progress.step, 0), self._progress.phase, 0, True)
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
        self._moves: dict[int, int] = {}
        self._still_s: dict[int, float] = {}

    def tick(self, peers: Iterable[Peer], seconds: float) -> tuple[Peer, Reading, str] | None:
        """So much time has gone by. If there is a hang: who is behind, where, and what is known of it."""
        present = [peer for peer in peers if peer.is_in_run]
        readings = {peer.rank: peer.progress.read() for peer in present}
        for rank, reading in readings.items():
            moved = self._moves.get(rank) != reading.moves
            self._moves[rank] = reading.moves
            self._still_s[rank] = 0.0 if moved else self._still_s[rank] + seconds
        longest = max((reading.waited_s for reading in readings.values()), default=0.0)
        nobody_moves = all(self._still_s[rank] >= self._limit for rank in readings)
        if longest < self._limit + (0.0 if nobody_moves else LENIENCY_S) or len(present) == 1:
            return None
        return _judge(present, readings)


def _judge(present: Sequence[Peer], readings: dict[int, Reading]) -> tuple[Peer, Reading, str]:
    late = _behind(present, readings)
    waiting = [peer for peer in present if peer is not late and readings[peer.rank].waited_s > 0]
    by = max(waiting, key=lambda peer: readings[peer.rank].waited_s) if waiting else present[0]
    at = readings[by.rank]
    text = f"{by.name} waited for it for {at.waited_s:.0f} s{_place(at.step, at.phase)}"
    if late is None:
        return by, at, f"it has waited for {at.waited_s:.0f} s; no rank is behind: all are at the same point"
    reading = readings[late.rank]
    if reading.waited_s == 0:
        return late, reading, f"{text}; its device has nothing left to do, it is its host that does not go on"
    point = reading.device
    if point is None:
        return late, reading, f"{text}; its device has not passed any mark"
    does = "waits for others, too" if point.communicates else "computes and does not come to an end"
    return late, Reading(point.step, point.phase), f"{text}; its device {does}"


def _behind(present: Sequence[Peer], readings: dict[int, Reading]) -> Peer | None:
    """Who is waited for; None if that cannot be told."""
    # Who waits is not who is waited for. If some rank does not wait, it is the one of these that is least far; if all
    # do, the one whose device has passed the fewest marks; if all are as far, nobody can be named.
    elsewhere = [peer for peer in present if readings[peer.rank].waited_s == 0]
    if elsewhere:
        return min(elsewhere, key=lambda peer: _order(readings[peer.rank].step, readings[peer.rank].phase))
    keys = {peer.rank: _device_order(readings[peer.rank]) for peer in present}
    first = min(keys.values())
    if all(key == first for key in keys.values()):
        return None
    return next(peer for peer in present if keys[peer.rank] == first)


def _device_order(reading: Reading) -> tuple[int, bool, int, int]:
    point = reading.device
    if point is None:
        return (-1, False, 0, 0)
    step, phase = _order(point.step, point.phase)
    return (step, point.communicates, phase, 0 if point.communicates else point.count)


def _order(step: int, phase: str) -> tuple[int, int]:
    return step, _ORDER.index(phase) if phase in _ORDER else len(_ORDER)


def _place(step: int, phase: str) -> str:
    return f" at step {step}{f' ({phase})' if phase else ''}" if step >= 0 else ""
