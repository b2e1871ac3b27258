"""One batch for all ranks of a pipeline: that of the first, whatever samplers and augmentation gave the others."""

from __future__ import annotations

from types import GeneratorType
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.pipeline.partition.fingerprint import known_to_be_same, same_everywhere
from lightning_smddp.pipeline.runtime.host_values import HostValues
from lightning_smddp.wire.broadcast import Channel, HeaderCache, UnsendableError, broadcast_structure
from lightning_smddp.wire.pytree import leaves, map_leaves

_ONCE = (GeneratorType, map, zip, filter)  # they give their entries once, but a step runs several times on a batch


class RepeatableIterator:
    """An iterator over what another one gave. A copy that is made before the first entry is taken begins anew."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries, self.position = entries, 0

    def __iter__(self) -> RepeatableIterator:
        return self

    def __next__(self) -> Any:
        if self.position == len(self.entries):
            raise StopIteration
        self.position += 1
        return self.entries[self.position - 1]


def repeatable(batch: Any) -> Any:
    """``batch`` with :class:`RepeatableIterator` instead of its generators, which are exhausted for it."""
    if not any(isinstance(leaf, _ONCE) for leaf in leaves(batch)):
        return batch

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, _ONCE):
            return RepeatableIterator(list(leaf))
        return leaf

    return map_leaves(replaced, batch)


class BatchAgreement:
    """Makes the ranks of a pipeline have the same batches.

    Args:
        group: the ranks of the pipeline.
        device: where its collectives take their tensors from.
        host: the same ranks, for comparing.
        values: what the host knows of tensors on the device: only these are compared, as reading others waits.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        host: Channel | None = None,
        values: HostValues | None = None,
    ) -> None:
        self._group, self._device = group, device
        self._host, self._values = host or Channel(group, device), values or HostValues()
        self._caches: dict[Any, HeaderCache] = {}
        self._differ: set[Any] = set()  # kinds of batches that differed once, and will again: no need to compare them
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
        if kind not in self._differ:
            if known_to_be_same(batch, self._values.of, *self._host):
                return batch
            if self._sends:
                self._differ.add(kind)
        self._values.forget()  # the first rank's copies are no longer this batch
        if not self._sends and same_everywhere(batch, self._group, self._device):
            return batch
        cache = self._caches.setdefault(kind, HeaderCache())
        try:
            return broadcast_structure(batch, self._group, 0, self._device, cache=cache, like=batch, host=self._host)
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
