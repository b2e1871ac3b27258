"""One batch for all ranks of a pipeline: that of the first, whatever samplers and augmentation gave the others.

Each rank has read its own batch. The first ones of each kind are compared before they are run. Where they differ, the
first rank's is sent to the others from then on. Else later ones are trusted: a number for what the host has of each,
with a sample of its tensors, travels with what the step shows, and a difference is an error there.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.communication.objects import UnsendableError, gather
from lightning_smddp.communication.tensors import broadcast_structure
from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.pipeline.partition.microbatches import attributes_of
from lightning_smddp.pytree import Members, members_of

_COMPARED = 3  # batches of a kind that are compared before they are run
_SAMPLED = 256  # elements of a tensor that are looked at in later ones
_DEPTH = 3  # of objects in objects that are looked into

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

    It is of structure, numbers, strings, shapes and elements of tensors and arrays, and of what objects consist of.
    What cannot be pickled, such as a lock, counts by its type and attributes.

    Args:
        batch: anything.
        sampled: elements of a tensor that are looked at, which is quick: of tensors on a device there are none. None:
            all.
    """
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, batch, sampled, _DEPTH)
    return int.from_bytes(digest.digest(), "little") >> 2


def _add(digest: Any, value: Any, sampled: int | None, depth: int) -> None:
    text = type(value).__qualname__
    content: Any = b""
    members = members_of(value)
    if isinstance(value, np.ndarray):
        text += f"{value.dtype}{value.shape}"
        seen = value.reshape(-1)[:: _step(value.size, sampled)]
        if value.dtype.hasobject:
            members = list(enumerate(seen))
        else:
            content = seen.tobytes()
    elif isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        text += f"{value.dtype}{value.requires_grad}{value.shape}"
        if value.device.type == "cpu" or (sampled is None and not value.is_meta):
            flat = value.detach().resolve_conj().resolve_neg().reshape(-1)[:: _step(value.numel(), sampled)]
            content = flat.contiguous().cpu().view(torch.uint8).numpy().data
    elif isinstance(value, _VALUES):
        text += repr(value)
    elif isinstance(value, (set, frozenset)):
        members = list(enumerate(sorted(value, key=repr)))  # their own order is another one in each process
    elif members is None and depth:
        members = _parts(value)
        depth -= 1
    digest.update(f"{text}{len(members or ())}".encode())
    digest.update(content)
    for key, member in members or ():
        digest.update(str(key).encode())
        _add(digest, member, sampled, depth)


def _parts(value: Any) -> Members:
    """What ``pickle`` would write of an object: also what is in slots, or what an extension keeps."""
    try:
        parts = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        entries = map(list, filter(None, parts[3:5]))  # iterators over those of a kind of list or mapping
        return list(enumerate([*parts[:3], *entries]))
    except Exception:  # whatever the object's own methods raise: it cannot be pickled
        return list(attributes_of(value).items())


def _step(count: int, sampled: int | None) -> int:
    return max(1, -(-count // sampled)) if sampled else 1
