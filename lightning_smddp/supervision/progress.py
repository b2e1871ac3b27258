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
_STEP, _PHASE, _EPOCH, _BATCHES = range(4)
_BYTES = 4 * 8


@dataclass(frozen=True)
class Reading:
    """What a rank's progress was at one moment; -1 stands for "not yet"."""

    step: int = -1
    phase: str = ""
    epoch: int = -1
    batches: int = 0

    def to_json(self) -> list[Any]:
        """As plain values."""
        return [self.step, self.phase, self.epoch, self.batches]

    @classmethod
    def from_json(cls, values: list[Any]) -> Reading:
        """The reverse; raises ``ValueError`` or ``TypeError`` for anything else."""
        step, phase, epoch, batches = values
        return cls(int(step), str(phase)[:40], int(epoch), int(batches))


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
            os.posix_fallocate(self.descriptor, 0, _BYTES)
        else:
            self.descriptor = -1
        self._memory = mmap.mmap(self.descriptor, _BYTES)
        self._cells = memoryview(self._memory).cast("q")
        self._cells[_STEP] = self._cells[_EPOCH] = -1

    @property
    def step(self) -> int:
        """See the class."""
        return self._cells[_STEP]

    @step.setter
    def step(self, value: int) -> None:
        self._cells[_STEP] = value

    @property
    def phase(self) -> str:
        """See the class."""
        return PHASES[self._cells[_PHASE]]

    @phase.setter
    def phase(self, value: str) -> None:
        number = _NUMBERS.get(value)
        if number is None:
            raise ValueError(f"phase={value!r} is unknown. Valid: {', '.join(map(repr, PHASES))}.")
        self._cells[_PHASE] = number

    @property
    def batches(self) -> int:
        """See the class."""
        return self._cells[_BATCHES]

    @batches.setter
    def batches(self, value: int) -> None:
        self._cells[_BATCHES] = value

    @property
    def epoch(self) -> int:
        """See the class."""
        return self._cells[_EPOCH]

    def start_epoch(self, epoch: int) -> None:
        """From here on ``batches`` counts those of ``epoch``."""
        self._cells[_BATCHES] = 0  # first, lest a reader takes the last epoch's batches for the new one's
        self._cells[_EPOCH] = epoch

    def read(self) -> Reading:
        """All of it."""
        return _read(self._cells)

    def close(self) -> None:
        """Give the shared memory back; the attributes stay, in memory of this process only."""
        if self.descriptor >= 0:
            shared, self._cells = self._cells, _copy(self._cells)
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
        self.told, self.descriptor = Reading(), descriptor
        self._memory: mmap.mmap | None = None
        self._cells: memoryview | None = None
        # Another user's process, another kernel than Linux, or the process has gone: its messages have to do.
        with contextlib.suppress(OSError, ValueError):
            if pid is not None and descriptor >= 0:
                file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._memory = mmap.mmap(file, _BYTES, access=mmap.ACCESS_READ)
                    self._cells = memoryview(self._memory).cast("q")
                finally:
                    os.close(file)

    def read(self) -> Reading:
        """The newest that is known."""
        return self.told if self._cells is None else _read(self._cells)

    def close(self) -> None:
        """Give the memory back; what was read last stays known."""
        if self._cells is not None and self._memory is not None:
            self.told = self.read()
            self._cells.release()
            self._memory.close()
            self._cells = self._memory = None


def _copy(cells: memoryview) -> memoryview:
    return memoryview(bytearray(cells.tobytes())).cast("q")


def _read(cells: memoryview) -> Reading:
    number = cells[_PHASE]
    phase = PHASES[number] if 0 <= number < len(PHASES) else ""
    return Reading(cells[_STEP], phase, cells[_EPOCH], cells[_BATCHES])
