"""One batch for all ranks of a pipeline: that of the first, whatever samplers and augmentation gave the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.pipeline.broadcast import HeaderCache, UnsendableError, broadcast_structure
from lightning_smddp.pipeline.fingerprint import same_everywhere
from lightning_smddp.pipeline.iterators import repeatable


class BatchAgreement:
    """Makes the ranks of a pipeline have the same batches.

    Args:
        group: the ranks of the pipeline.
        device: where its collectives take their tensors from.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._caches: dict[Any, HeaderCache] = {}
        self._compares = device.type == "cpu"  # elsewhere sending costs less than looking
        self._sends = True

    def agree(self, batch: Any, kind: Any) -> Any:
        """The first rank's batch, with generators that can be run through again. Collective.

        Args:
            batch: of this rank.
            kind: batches of one kind are built alike.

        Raises:
            ValueError: on every rank: batches differ, and cannot be sent.
        """
        batch = repeatable(batch)
        if self._group.size() == 1:
            return batch
        if self._compares or not self._sends:
            if same_everywhere(batch, self._group, self._device):
                return batch
            self._compares = not self._sends  # ranks that differ once will again, so there is no need to ask
        cache = self._caches.setdefault(kind, HeaderCache())
        try:
            return broadcast_structure(batch, self._group, 0, self._device, cache=cache, like=batch)
        except UnsendableError as error:
            if self._sends and same_everywhere(batch, self._group, self._device):
                self._sends = False
                return batch
            raise ValueError(_refusal(str(error))) from error


def _refusal(why: str) -> str:
    return (
        f"The ranks of a pipeline have different batches, and that of the first cannot be sent to the others: in the "
        f"batch, {why} Or let all ranks make the same batches: `seed_everything(seed, workers=True)` before fit, a "
        "sampler or dataset with a `torch.Generator` that has a fixed seed, and no random numbers that depend on the "
        "rank. Then nothing is sent, and batches may be of any kind."
    )
