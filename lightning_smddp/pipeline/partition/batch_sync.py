"""One batch for all ranks of a pipeline: that of the first, whatever samplers and augmentation gave the others.

Each rank has read its own batch. The first ones of each kind are compared before they are run. Where they differ, the
first rank's is sent to the others from then on. Else later ones are trusted: a number for what the host has of each,
with a sample of its tensors, travels with what the step shows, and a difference is an error there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.communication.objects import UnsendableError, gather, pickled
from lightning_smddp.communication.tensors import broadcast_structure
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.partition.microbatches import DEPTH, attributes_of, signature
from lightning_smddp.pytree import leaves

_COMPARED = 3  # batches of a kind that are compared before they are run
_SAMPLED = 256  # elements of a tensor that are looked at in later ones

_VALUES = (str, bytes, int, float, complex, np.generic, type(None), torch.dtype)

CURE = (
    "Let all ranks make the same batches: `seed_everything(seed, workers=True)` before fit, a sampler or dataset with "
    "a `torch.Generator` that has a fixed seed, and no random numbers that depend on the rank."
)


class BatchSync:
    """Makes the ranks of a pipeline have the same batches.

    Args:
        host: the ranks, for what hosts tell each other.
        pipeline: the same ranks, for what is on the device where batches are.

    Attributes:
        on_host: the present batch as it was before it was moved to the device; None where that is not known.
        digest: of the present batch, the same on all ranks where they have the same; 0 for those that were compared.
    """

    def __init__(self, host: Channel, pipeline: Channel) -> None:
        self._group = host.group
        self._pipeline = pipeline
        self._compared: dict[Any, float] = {}  # how many, by kind
        self._noted: Any = None
        self.on_host: Any = None
        self.digest = 0

    def note(self, batch: Any) -> None:
        """The next batch is ``batch``, which is moved to the device as it is: no need to read it there."""
        self._noted = batch

    def same(self, batch: Any, kind: Any) -> Any:
        """The first rank's batch. Collective for the first ones of a kind, and where they differ.

        Args:
            batch: of this rank.
            kind: batches of one kind are made alike.

        Raises:
            ValueError: on every rank: batches differ, and the first one's cannot be sent.
        """
        self.on_host, self._noted = self._noted, None
        self.digest = 0
        if self._group.size() == 1:
            return batch
        count = self._compared.get(kind, 0)  # inf where they differ
        if _COMPARED <= count < math.inf:
            self.digest = digest_of(batch if self.on_host is None else self.on_host, _SAMPLED)
            return batch
        if count < _COMPARED and len(set(gather(digest_of(batch), self._group))) == 1:
            self._compared[kind] = count + 1
            return batch
        self._compared[kind] = math.inf
        self.on_host = None
        try:
            return broadcast_structure(batch, self._pipeline.group, 0, self._pipeline.device)
        except UnsendableError as error:
            raise ValueError(
                f"The ranks of a pipeline have different batches, and that of the first cannot be sent: {error}. {CURE}"
            ) from error


def digest_of(batch: Any, sampled: int | None = None) -> int:
    """A number of 62 bits that is another one for nearly every other batch.

    It is of structure, numbers, strings, shapes and elements of tensors and arrays, and of what objects are pickled as.
    What cannot be pickled, as it holds a lock, counts by its attributes.

    Args:
        batch: anything.
        sampled: elements of a tensor that are looked at, which is quick: of tensors on a device there are none, and
            objects count by their attributes. None: all.
    """
    digest = hashlib.blake2b(signature(batch).encode(), digest_size=8)
    for leaf in leaves(batch):
        digest.update(_content(leaf, sampled, DEPTH))
    return int.from_bytes(digest.digest(), "little") >> 2


def _contents(values: Iterable[Any], sampled: int | None, depth: int) -> bytes:
    return b"".join(_content(leaf, sampled, depth) for leaf in leaves(list(values)))


def _content(leaf: Any, sampled: int | None, depth: int) -> bytes:
    if isinstance(leaf, _VALUES):
        return repr(leaf).encode()
    if isinstance(leaf, np.ndarray):
        seen = leaf.reshape(-1)[:: _step(leaf.size, sampled)]
        return _contents(seen, sampled, depth) if leaf.dtype.hasobject else bytes(seen.tobytes())
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return _contents(leaf.unbind(), sampled, depth)
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        if leaf.is_meta or (sampled is not None and not leaf.is_cpu):
            return b""
        flat = leaf.detach().resolve_conj().resolve_neg().reshape(-1)[:: _step(leaf.numel(), sampled)]
        return flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    data = pickled(leaf) if sampled is None else ""
    if isinstance(data, bytes):
        return data
    return _contents(attributes_of(leaf).values(), sampled, depth - 1) if depth else b""


def _step(count: int, sampled: int | None) -> int:
    return max(1, -(-count // sampled)) if sampled else 1
