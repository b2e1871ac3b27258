"""What ends a step on one rank ends it on all.

A step may leave its path on one stage while the schedule runs. The stage goes on with messages of the right sizes and
no meaning, up to the schedule's end, so that no other stage waits for messages. Then all ranks hear of it, throw the
batch away, and may run it again, on another path or in another way. What messages and :class:`LeftCourseError` call the
step's course is its path.

A step that all ranks run for nothing at the same time has :class:`Together`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.same_batch import same_everywhere
from lightning_smddp.pipeline.runtime.remote import Boundary, ReplayError
from lightning_smddp.wire.gather import gather_json

_BYTE = 0xFF  # each byte of these NaNs, in all formats; arithmetic makes others

Result = TypeVar("Result")


class LeftCourseError(ReplayError):
    """Raised on every rank of the pipeline, behind the schedule: nothing that it has made counts.

    Attributes:
        failures: by micro-batch, how the step left its path.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        super().__init__(failures[min(failures)])
        self.failures = dict(failures)


def without_meaning(boundary: Boundary, device: torch.device) -> tuple[Tensor, ...]:
    """What a stage sends that has left its path: a NaN that no arithmetic makes; zeros of types without."""
    sent = []
    for spec in boundary:
        tensor = spec.empty(device)
        if _has_nan(tensor):
            # Every bit is set: a NaN in each format, with a payload that no arithmetic of ours makes. So the receiver
            # tells it from a NaN of the user's.
            in_bytes = torch.full((tensor.element_size(),), _BYTE, dtype=torch.uint8, device=device)
            nan = in_bytes.view(tensor.dtype)
            sent.append(tensor.copy_(nan.expand(tensor.shape)))
        else:
            sent.append(tensor.zero_())
    return tuple(sent)


def has_no_meaning(received: Sequence[Tensor]) -> bool:
    """Whether an earlier stage has left its path, so that any error is its fault."""
    has_seen_any = False
    for tensor in received:
        if not _has_nan(tensor) or not tensor.numel():
            continue
        flat = tensor.detach().contiguous().reshape(-1)
        in_bytes = flat.view(torch.uint8)
        if not (in_bytes == _BYTE).all():
            return False
        has_seen_any = True
    return has_seen_any


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def require_no_departure(
    failures: Mapping[int, str],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise :class:`LeftCourseError` on every rank if one has ``failures``. Collective over the pipeline."""
    if group.size() == 1:
        if failures:
            raise LeftCourseError(failures)
        return
    # Nearly always no rank has anything to say, and all give the same: one small message. A rank that has something
    # puts its number in, so that ranks differ even if all have the same.
    local = sorted(failures.items())
    said: list[Any] = []
    if failures:
        said = [group.rank(), local]
    if same_everywhere(said, group, device):
        return
    found: dict[int, str] = {}
    for remote in gather_json(local, group, device):
        for index, text in remote:
            found.setdefault(index, text)
    if found:
        raise LeftCourseError(found)


class StepFailedError(SplitError):
    """The step itself raised something while it was run for nothing: on this rank its cause, or on another one."""


class Together:
    """Runs a function on every rank of ``group``, whose collectives take tensors of ``device``.

    Its collectives are announced by :meth:`meet`: a rank that has come to its end, or to an error, is known to those
    that would wait for it there.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._ended: str | None = None  # why there are no more collectives; None before the end

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
            told = gather_json({"error": error}, self.group, self.device)
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
