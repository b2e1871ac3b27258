"""How far this rank is: written by the training thread, read by the watching ones, also after the process's end."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import Any

PHASES = (
    "",
    "setup",
    "data",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "validation",
    "checkpoint",
    "test",
    "predict",
    "teardown",
)
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
# What is in the shared memory: ten signed words. The last four are the device's point; its step is -1 if there is none.
_STEP, _PHASE, _EPOCH, _BATCHES, _MOVES, _WAITED_MS, _AT_STEP, _AT_PHASE, _AT_COUNT, _AT_COMMUNICATES = range(10)
_BYTES = 10 * 8
_PHASE_CHARACTERS = 40  # that another rank may send


@dataclass(frozen=True)
class DevicePoint:
    """How far a device has come with what the host has launched.

    Attributes:
        step: the optimizer step.
        phase: of it.
        count: marks in this phase before this one, see ``DeviceWatch``.
        communicates: whether what follows the mark is communication.
    """

    step: int
    phase: str
    count: int
    communicates: bool


@dataclass(frozen=True)
class Reading:
    """What a rank's progress was at one moment; -1 stands for "not yet".

    ``moves`` counts the changes of the others. ``waited_s`` says for how long neither the host nor its device have
    moved, with work left on the device; ``device`` is where that is, None if there are no marks.
    """

    step: int = -1
    phase: str = ""
    epoch: int = -1
    batches: int = 0
    moves: int = 0
    waited_s: float = 0.0
    device: DevicePoint | None = None

    def to_json(self) -> list[Any]:
        """All attributes in their order; ``device`` as a list of its own, or None."""
        point = self.device
        device = None
        if point is not None:
            device = [point.step, point.phase, point.count, point.communicates]
        return [
            self.step,
            self.phase,
            self.epoch,
            self.batches,
            self.moves,
            self.waited_s,
            device,
        ]

    @classmethod
    def from_json(cls, values: list[Any]) -> Reading:
        """The reverse; raises ``ValueError`` or ``TypeError`` for anything else."""
        step, phase, epoch, batches, moves, waited_s, device = values
        point = None
        if device is not None:
            at_step, at_phase, count, communicates = device
            point = DevicePoint(
                int(at_step),
                str(at_phase)[:_PHASE_CHARACTERS],
                int(count),
                bool(communicates),
            )
        return cls(
            int(step),
            str(phase)[:_PHASE_CHARACTERS],
            int(epoch),
            int(batches),
            int(moves),
            float(waited_s),
            point,
        )


class Progress:
    """Set ``step``, ``phase`` and ``batches`` as training goes on: writes to memory, no system call.

    The memory is a nameless file, so that ranks of one host can read it when this process is stopped or dead.

    Attributes:
        step: number of the optimizer step that is being computed.
        phase: one of :data:`PHASES`; ``ValueError`` for others.
        epoch: set by :meth:`start_epoch`.
        batches: batches of this epoch that this rank has begun.
    """

    __slots__ = ("_cells", "_memory", "descriptor")

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("lightning_smddp_progress", os.MFD_CLOEXEC)
            # The room is taken now: a write to the memory that finds none is a SIGBUS.
            os.posix_fallocate(self.descriptor, 0, _BYTES)
        else:
            self.descriptor = -1
        self._memory = mmap.mmap(self.descriptor, _BYTES)
        # No lock: a reader must not depend on a rank that was stopped while it held one. Each cell is a word of its
        # own, read by itself, so what is read of several may be of two moments.
        self._cells = memoryview(self._memory).cast("q")
        self._cells[_STEP] = self._cells[_EPOCH] = self._cells[_AT_STEP] = -1

    @property
    def step(self) -> int:
        """Number of the optimizer step that is being computed; -1 before the first."""
        return self._cells[_STEP]

    @step.setter
    def step(self, value: int) -> None:
        self._cells[_STEP] = value
        self._cells[_MOVES] += 1

    @property
    def phase(self) -> str:
        """One of :data:`PHASES`; set to anything else it raises ``ValueError``."""
        return PHASES[self._cells[_PHASE]]

    @phase.setter
    def phase(self, value: str) -> None:
        number = _NUMBERS.get(value)
        if number is None:
            valid = ", ".join(repr(phase) for phase in PHASES)
            raise ValueError(f"phase={value!r} is unknown. Valid: {valid}.")
        self._cells[_PHASE] = number
        self._cells[_MOVES] += 1

    @property
    def batches(self) -> int:
        """Batches of this epoch that this rank has begun."""
        return self._cells[_BATCHES]

    @batches.setter
    def batches(self, value: int) -> None:
        self._cells[_BATCHES] = value
        self._cells[_MOVES] += 1

    @property
    def epoch(self) -> int:
        """Number of the epoch, as :meth:`start_epoch` was told; -1 before the first."""
        return self._cells[_EPOCH]

    def start_epoch(self, epoch: int) -> None:
        """From here on ``batches`` counts those of ``epoch``."""
        self._cells[_BATCHES] = 0  # first, lest a reader takes the last epoch's batches for the new one's
        self._cells[_EPOCH] = epoch

    @property
    def moves(self) -> int:
        """How often any of it was set."""
        return self._cells[_MOVES]

    def moved(self) -> None:
        """This rank goes on, in a way that the rest does not show: a batch of a validation, say."""
        self._cells[_MOVES] += 1

    def waits(self, seconds: float, device: DevicePoint | None) -> None:
        """For how long neither host nor device have moved, and where the device is. For the watching thread."""
        self._cells[_WAITED_MS] = round(seconds * 1000)
        if device is None:
            self._cells[_AT_STEP] = -1
            return
        self._cells[_AT_STEP] = device.step
        self._cells[_AT_PHASE] = _NUMBERS.get(device.phase, 0)
        self._cells[_AT_COUNT] = device.count
        self._cells[_AT_COMMUNICATES] = device.communicates

    def read(self) -> Reading:
        """Batch, epoch, step and phase, as the rank last wrote them."""
        return _read(self._cells)

    def close(self) -> None:
        """Give the shared memory back; the attributes stay, in memory of this process only."""
        if self.descriptor < 0:
            return
        # The copy first: the training thread may read and write the attributes meanwhile.
        shared = self._cells
        copy = bytearray(shared.tobytes())
        self._cells = memoryview(copy).cast("q")
        shared.release()
        self._memory.close()  # it has a descriptor of its own
        os.close(self.descriptor)
        self.descriptor = -1


class RemoteProgress:
    """A rank's progress, seen from another process: its own memory if on this host, else its last message.

    Args:
        pid: the other process, if it is on this host, else None.
        descriptor: of its :class:`Progress`, in that process.
    """

    def __init__(self, pid: int | None, descriptor: int) -> None:
        self.told = Reading()
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._cells: memoryview | None = None
        if pid is None or descriptor < 0:
            return
        # Another user's process, another kernel than Linux, or the process has gone: its messages have to do.
        with contextlib.suppress(OSError, ValueError):
            file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._memory = mmap.mmap(file, _BYTES, access=mmap.ACCESS_READ)
                self._cells = memoryview(self._memory).cast("q")
            finally:
                os.close(file)

    def read(self) -> Reading:
        """The rank's progress as its memory has it now; as its last message told, where that cannot be seen."""
        if self._cells is None:
            return self.told
        return _read(self._cells)

    def close(self) -> None:
        """Give the memory back; what was read last stays known."""
        if self._cells is not None and self._memory is not None:
            self.told = self.read()
            self._cells.release()
            self._memory.close()
            self._cells = self._memory = None


def _read(cells: memoryview) -> Reading:
    device = None
    if cells[_AT_STEP] >= 0:
        phase = _phase(cells[_AT_PHASE])
        communicates = bool(cells[_AT_COMMUNICATES])
        device = DevicePoint(cells[_AT_STEP], phase, cells[_AT_COUNT], communicates)
    return Reading(
        cells[_STEP],
        _phase(cells[_PHASE]),
        cells[_EPOCH],
        cells[_BATCHES],
        cells[_MOVES],
        cells[_WAITED_MS] / 1000,
        device,
    )


def _phase(number: int) -> str:
    """The name of a phase; empty for a number that is none's."""
    if not 0 <= number < len(PHASES):
        return ""
    return PHASES[number]


def place(step: int, phase: str) -> str:
    """`` at step 7 (backward)``, as far as either is known: -1 and an empty phase are left out."""
    text = ""
    if step >= 0:
        text += f" at step {step}"
    if phase:
        text += f" ({phase})"
    return text
