"""A step that all ranks run for nothing at the same time: what ends it on one rank ends it on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.wire.gather import gather_json

Result = TypeVar("Result")


class StepFailedError(SplitError):
    """The step itself raised something while it was run for nothing: on this rank its cause, or on another one."""


class Together:
    """Runs a function on every rank of ``group``, whose collectives take tensors of ``device``.

    Its collectives are announced by :meth:`meet`: a rank that has come to its end, or to an error, is known to those
    that would wait for it there.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._ended: str | None = None  # why there are no more collectives

    def meet(self, location: str) -> None:
        """Before a collective at ``location`` (file:line of the user's code). Collective.

        Raises:
            StepFailedError: another rank does not come there.
        """
        # Each rank sends one message: the collective it has come to, its error, or its end. So all of them take part in
        # this exchange wherever they are, and nobody is left alone in the user's own collective.
        if self._ended is None:
            told = gather_json({"location": location}, self.group, self.device)
            if all(other == told[0] for other in told):
                return
            self._end(told)
        raise StepFailedError(self._ended)

    def run(self, attempt: Callable[[], Result]) -> Result:
        """What ``attempt`` returns, if no rank fails. Collective.

        Raises:
            SplitError: on every rank, where one has failed; what ``attempt`` raised here is its cause.
        """
        try:
            result = attempt()
        except Exception as error:
            self._end_here(repr(error))
            if isinstance(error, SplitError):
                raise
            assert self._ended
            raise StepFailedError(self._ended) from error
        self._end_here(None)
        if self._ended:
            raise StepFailedError(self._ended)
        return result

    def _end_here(self, error: str | None) -> None:
        if self._ended is None:
            self._end(gather_json({"error": error}, self.group, self.device))

    def _end(self, told: list[dict[str, Any]]) -> None:
        """Nobody is to wait from here on. ``_ended`` is empty if all have come to the end without an error."""
        failed = [rank for rank, one in enumerate(told) if one.get("error") is not None]
        if failed:
            self._ended = f"The step failed on rank {failed[0]} while it was traced: {told[failed[0]]['error']}"
        elif any(one != told[0] for one in told):
            found = ", ".join(f"{one.get('location', 'its end')} on rank {rank}" for rank, one in enumerate(told))
            self._ended = f"The step takes another course on each rank: while it was traced it came to {found}."
        else:
            self._ended = ""
