"""The first rank says on which paths the micro-batches of a batch run: a message to each rank, and no meeting.

A rank whose code goes elsewhere finds that in its run, and all ranks hear of it behind the schedule. If each rank
looked for itself, one that knows a path would begin the schedule, while another waits for it to be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.mesh import Channel

_ENTRIES = 64  # of a message: how many numbers are still to come, and as many of these as fit
_FAILED = -1  # in place of how many


class PathNumbers:
    """Sends them; one for each kind of step.

    Args:
        host: the ranks of a pipeline.
    """

    def __init__(self, host: Channel) -> None:
        self._group, self._device = host
        self._sent: list[tuple[Any, Tensor]] = []  # messages on their way

    def receive(self) -> list[int] | None:
        """What the first rank sends, on another one, which waits for it."""
        found: list[int] = []
        to_come = 1
        while to_come > 0:
            message = torch.zeros(_ENTRIES, dtype=torch.int64, device=self._device)
            dist.recv(message, group=self._group, group_src=0)
            count, *part = message.tolist()
            if count == _FAILED:
                return None
            found += part[:count]
            to_come = count - len(part)
        return found

    def send(self, numbers: Sequence[int] | None) -> None:
        """From the first rank, which waits for nobody. None: it has failed to find them."""
        for work, _ in self._sent:
            work.wait()  # of an earlier batch: they have arrived
        self._sent = []
        rest = list(numbers or ())
        while True:
            part = rest[: _ENTRIES - 1]
            message = torch.zeros(_ENTRIES, dtype=torch.int64, device=self._device)
            message[: 1 + len(part)] = torch.tensor([_FAILED if numbers is None else len(rest), *part])
            for rank in range(1, self._group.size()):
                work = dist.isend(message, group=self._group, group_dst=rank)
                self._sent.append((work, message))
            rest = rest[len(part) :]
            if not rest:
                return
