"""How far a CUDA device has come, as seen from a thread that must not wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch

from lightning_smddp.supervision.progress import DevicePoint, Progress

_LOOK_S = 0.05  # between two looks at the marks
_KEPT = 512  # marks that may be under way
_current: DeviceWatch | None = None  # a rank has one device


def mark(communicates: bool = False) -> None:
    """What was launched so far belongs to what was before; ``communicates``: what follows is communication.

    Nothing on other devices, or where nobody watches. Costs an event on the current stream, and no wait.
    """
    if _current is not None:
        _current.mark(communicates)


class DeviceWatch:
    """Marks of the training thread on its stream, and looks of the watching thread at how many have been passed.

    Every call of CUDA may block where the device hangs, so the looks are done by a thread that nobody waits for.

    Args:
        device: of this rank.
        progress: says what a mark stands for.
    """

    def __init__(self, device: torch.device, progress: Progress) -> None:
        global _current
        self._device = device
        self._progress = progress
        self._marks: deque[tuple[Any, DevicePoint]] = deque(maxlen=_KEPT)
        self._phase = (-1, "")  # step and phase of the last mark, and how many came before it in that phase
        self._count = 0
        self._at: DevicePoint | None = None
        self._looking: threading.Thread | None = None
        self._number = 0  # of the last look
        _current = self

    def mark(self, communicates: bool) -> None:
        """See :func:`mark`."""
        step = max(self._progress.step, 0)
        phase = self._progress.phase
        if self._phase == (step, phase):
            self._count += 1
        else:
            self._phase = (step, phase)
            self._count = 0
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        point = DevicePoint(step, phase, self._count, communicates)
        self._marks.append((event, point))

    def look(self) -> int | None:
        """See :class:`~lightning_smddp.supervision.hangs.Device`: a thread waits for what was launched by now."""
        if self._looking is not None and self._looking.is_alive():
            return self._number
        self._number += 1
        self._looking = threading.Thread(target=self._wait, name="smddp-device", daemon=True)
        self._looking.start()
        return None

    def where(self) -> DevicePoint | None:
        """The last mark that the device was seen to have passed."""
        return self._at

    def close(self) -> None:
        """Steps that come set no marks: nobody reads them."""
        global _current
        if _current is self:
            _current = None
        self._marks.clear()

    def _wait(self) -> None:
        """Until the device has done all that was launched before, and note which marks it passes."""
        # This event is recorded behind all that was launched on the default stream by now. It is asked, not waited for,
        # so that the marks before it can be looked at meanwhile.
        end = torch.cuda.Event()
        end.record(torch.cuda.default_stream(self._device))
        while not end.query():
            self._pass_marks()
            time.sleep(_LOOK_S)

    def _pass_marks(self) -> None:
        while self._marks:
            event, _ = self._marks[0]
            if not event.query():
                return
            _, self._at = self._marks.popleft()
