"""What all ranks try at the same time: an error on one is raised on all, and one rank decides for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.runtime.remote import ReplayError
from lightning_smddp.wire.objects import broadcast, gather

Result = TypeVar("Result")


class StepFailedError(SplitError):
    """The step itself raised something while it was run for nothing: on this rank its cause, or on another one."""


class OnAllRanks:
    """Runs a function on every rank of ``group``.

    Its collectives are announced by :meth:`check`: a rank that has come to its end, or to an error, is known to those
    that would wait for it there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._ended: str | None = None  # why there are no more collectives; None before the end

    def check(self, location: str) -> None:
        """Before a collective at ``location`` (file:line of the user's code). Collective.

        Raises:
            StepFailedError: another rank does not come there.
        """
        # Each rank sends one message: the collective it has come to, its error, or its end. So all of them take part in
        # this exchange wherever they are, and nobody is left alone in the user's own collective.
        if self._ended is None:
            told = gather({"location": location}, self.group)
            if all(other == told[0] for other in told):
                return
            self._ended = _why_ended(told)
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
        # Only once: where the end was met in a collective of the step, all ranks know of it, and nobody waits here any
        # more.
        if self._ended is None:
            told = gather({"error": error}, self.group)
            self._ended = _why_ended(told)


def _why_ended(told: Sequence[Mapping[str, Any]]) -> str:
    """Why nobody is to wait from here on; empty if all ranks have come to the end without an error."""
    for rank, one in enumerate(told):
        error = one.get("error")
        if error is not None:
            return f"The step failed on rank {rank} while it was traced: {error}"
    if all(one == told[0] for one in told):
        return ""
    places = []
    for rank, one in enumerate(told):
        place = one.get("location", "its end")
        places.append(f"{place} on rank {rank}")
    return f"The step takes another course on each rank: while it was traced it came to {', '.join(places)}."


def own_error(error: Exception) -> BaseException:
    """What the user's code raised here, if it is that."""
    if isinstance(error, StepFailedError) and error.__cause__ is not None:
        return error.__cause__
    return error


def decided_by_first(decide: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """What ``decide`` returns on the first rank, or its error, on every rank. Collective.

    Raises:
        SplitError: the first rank's ``SplitError`` or ``ReplayError``, with its text.
        StepFailedError: any other error there; its cause is known on the first rank alone.
    """
    answer: Any = None
    if group.rank() == 0:
        try:
            answer = {"value": decide()}
        except (SplitError, ReplayError) as error:
            answer = {"error": str(error)}
        except Exception as error:
            text = f"The step failed on rank 0 while it was tried: {error!r}"
            # The others wait for an answer, whatever it is. Here the error itself is raised, as it has the cause.
            broadcast({"failure": text}, group)
            raise StepFailedError(text) from error
    answer = broadcast(answer, group)
    if "failure" in answer:
        raise StepFailedError(answer["failure"])
    if "error" in answer:
        raise SplitError(answer["error"])
    return answer["value"]
