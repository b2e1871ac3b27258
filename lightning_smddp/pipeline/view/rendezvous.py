"""Where the ranks of a pipeline meet in hooks: all of them for the same values, or the first one alone.

Nearly always all ranks have come to the same place of a hook and need the same values, which their owners send. Code
under ``if trainer.is_global_zero:``, and loggers that do nothing on other ranks, run on the first rank alone. The
others are at the hook's end then, or have gone on to where the next collective of training begins; there they send the
parameters, gradients and buffers that it asks for, until it has come there too::

    first rank:  hook ... asks for `p` ... end | training step
    others:      hook, end |      sends `p`    | training step

The first rank says what it wants in one small broadcast. So where it wants nothing, that is all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.capture.ops import user_location
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.view.global_tensor import GlobalViewError, key_of


class Request(enum.IntEnum):
    """What a rank comes for."""

    NOTHING = 0  # it is at a hook's end, or behind it
    WRITES = 1  # the same, and it has changed parameters: all ranks have to have changed them alike
    VALUES = 2
    GRADIENTS = 3  # which parameters have one


class Rendezvous:
    """Meetings of a pipeline's ranks.

    Attributes:
        written: names of parameters, gradients and buffers that have changed since ranks compared it, each with what
            tells how.

    Args:
        channel: the pipeline's ranks, for messages between hosts.
        answer: takes part in what the first rank alone asks for.
    """

    def __init__(self, channel: Channel, answer: Callable[[Request], None]) -> None:
        self.channel = channel
        self.rank = channel.group.rank()
        self._answer = answer
        self.written: dict[str, int] = {}
        self._last_write = "none"

    # ---- meeting ----

    def meet(self, request: Request, what: str = "", key: int = 0) -> bool:
        """Come for ``what``, and answer the first rank as long as it asks for something else. Collective.

        Args:
            request: what for.
            what: in words.
            key: the same on ranks that come for the same.

        Returns:
            Whether all ranks have come for the same; else this is the first one, which alone did.

        Raises:
            GlobalViewError: this rank asks alone and is not the first one; or on all ranks: they differ in what they
                have changed.
        """
        local = from_numbers([int(request), key], torch.int64, self.channel.device)
        while True:
            first = local.clone()
            dist.broadcast(first, group=self.channel.group, group_src=0)
            if int(first[0]) == Request.NOTHING:
                if request is not Request.NOTHING:
                    raise GlobalViewError(needed_alone(what, self.rank))
                return True
            rows = [torch.empty_like(local) for _ in range(self.channel.group.size())]
            dist.all_gather(rows, local, group=self.channel.group)
            requests = [tuple(row.tolist()) for row in rows]
            if len(set(requests)) == 1:
                return True
            if requests[0][0] == Request.WRITES:
                self._raise_difference()
            if requests[self.rank] == requests[0]:
                return False
            self._answer(Request(requests[0][0]))

    def end(self) -> None:
        """Wait until the first rank needs nothing any more, and compare what was written. Collective.

        Raises:
            GlobalViewError: on every rank, where they changed different parameters, or the same ones differently.
        """
        if self.written:
            self.meet(Request.WRITES, f"to change {self._last_write}", key_of(self.written))
        else:
            self.meet(Request.NOTHING)
        self.written.clear()

    def note_write(self, name: str, key: int) -> None:
        """The parameter, gradient or buffer ``name`` has changed; ``key`` tells how."""
        self.written[name] = key
        self._last_write = f"{name!r} at {user_location()}"

    def _raise_difference(self) -> None:
        lines = []
        for rank, write in enumerate(self.gather(self._last_write)):
            lines.append(f"on rank {rank} the last change so far is that of {write}")
        raise GlobalViewError(
            "The ranks of a pipeline changed different parameters in a hook or callback, or the same ones differently: "
            f"{'; '.join(lines)}. What changes parameters has to run on all ranks alike, not under "
            "`if trainer.is_global_zero:`."
        )

    # ---- messages ----

    def broadcast(self, value: Any, source: int) -> Any:
        """The ``value`` of rank ``source`` on every rank. Collective."""
        values = [value]
        dist.broadcast_object_list(values, group=self.channel.group, group_src=source, device=self.channel.device)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order. Collective."""
        values: list[Any] = [None] * self.channel.group.size()
        dist.all_gather_object(values, value, group=self.channel.group)
        return values


def needed_alone(what: str, rank: int) -> str:
    """Why ``rank`` does not get ``what``."""
    return (
        f"Rank {rank} of the pipeline alone needs {what}, as the others do not run this code. Run it on all ranks, and "
        "only print or write files under `if trainer.is_global_zero:`. The first rank alone can read parameters, "
        "gradients and buffers: `p.detach().cpu()` is a plain tensor, with which it may compute."
    )
