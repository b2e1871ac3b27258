"""A step that leaves its path on one stage while the schedule runs, so that no other stage waits for messages.

The stage goes on with messages of the right sizes and no meaning, up to the schedule's end. Then all ranks hear of it,
throw the batch away, and may run it again, on another path or in another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.partition.fingerprint import same_everywhere
from lightning_smddp.pipeline.runtime.remote import Boundary, ReplayError
from lightning_smddp.wire.gather import gather_json

_BYTE = 0xFF  # each byte of these NaNs, in all formats; arithmetic makes others


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
            nan = torch.full((tensor.element_size(),), _BYTE, dtype=torch.uint8, device=device).view(tensor.dtype)
            sent.append(tensor.copy_(nan.expand(tensor.shape)))
        else:
            sent.append(tensor.zero_())
    return tuple(sent)


def has_no_meaning(received: Sequence[Tensor]) -> bool:
    """Whether an earlier stage has left its path, so that any error is its fault."""
    shown = [tensor.detach() for tensor in received if _has_nan(tensor) and tensor.numel()]
    return bool(shown) and all(bool((t.contiguous().reshape(-1).view(torch.uint8) == _BYTE).all()) for t in shown)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def require_no_departure(
    failures: Mapping[int, str], group: dist.ProcessGroup, device: torch.device, news: int = 0
) -> int:
    """Raise :class:`LeftCourseError` on every rank if one has ``failures``. Collective over the pipeline.

    Returns:
        On every rank the largest ``news`` of any.
    """
    if group.size() == 1:
        if failures:
            raise LeftCourseError(failures)
        return news
    # ranks differ where there is anything: the number of one is in it
    if same_everywhere([group.rank(), sorted(failures.items())] if failures or news else [], group, device):
        return 0
    found: dict[int, str] = {}
    gathered = gather_json([sorted(failures.items()), news], group, device)
    for remote, _ in gathered:
        for index, text in remote:
            found.setdefault(index, text)
    if found:
        raise LeftCourseError(found)
    return max(int(news) for _, news in gathered)
