"""One batch for all ranks of a pipeline: that of the first, whatever samplers and augmentation gave the others.

Each rank has read its own batch. The first ones of each kind are compared in full. Where they differ, the first rank's
is sent to the others from then on. Else later ones are trusted: a sample of each travels with what the step shows, and
a difference is an error there.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from types import FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_smddp.pipeline.mesh import Channel
from lightning_smddp.wire.objects import UnsendableError, broadcast, gather
from lightning_smddp.wire.pytree import leaves, map_leaves

_COMPARED = 3  # batches of a kind that are compared in full
_SAMPLED = 256  # elements of a tensor that are looked at in later ones
_ONCE = (GeneratorType, map, zip, filter)  # they give their entries once, but a step runs several times on a batch

CURE = (
    "Let all ranks make the same batches: `seed_everything(seed, workers=True)` before fit, a sampler or dataset with "
    "a `torch.Generator` that has a fixed seed, and no random numbers that depend on the rank."
)


class BatchSync:
    """Makes the ranks of a pipeline have the same batches.

    Args:
        host: the ranks, for what hosts tell each other.
        device: where batches are.

    Attributes:
        on_host: the present batch as it was before it was moved to the device; None where that is not known.
    """

    def __init__(self, host: Channel, device: torch.device) -> None:
        self._group = host.group
        self._device = device
        self._compared: dict[Any, int] = {}  # by kind
        self._differ: set[Any] = set()  # kinds
        self._noted: Any = None
        self._sample: Tensor | None = None
        self._described = b""
        self.on_host: Any = None

    def note(self, batch: Any) -> None:
        """The next batch is ``batch``, which is moved to the device as it is: no need to read it there."""
        self._noted = batch

    def same(self, batch: Any, kind: Any) -> Any:
        """The first rank's batch. Collective for the first ones of a kind, and where they differ.

        Args:
            batch: of this rank. Generators in it become lists.
            kind: batches of one kind are made alike.

        Raises:
            ValueError: on every rank: batches differ, and the first one's cannot be sent.
        """
        batch = map_leaves(lambda leaf: list(leaf) if isinstance(leaf, _ONCE) else leaf, batch)
        self.on_host, self._noted = self._noted, None
        self._described, self._sample = b"", None
        if self._group.size() == 1:
            return batch
        if kind not in self._differ and self._compared.get(kind, 0) >= _COMPARED:
            self._described, self._sample = _sampled(batch if self.on_host is None else self.on_host)
            return batch
        self._compared[kind] = self._compared.get(kind, 0) + 1
        if kind not in self._differ:
            if self._are_equal(batch):
                return batch
            self._differ.add(kind)
        self.on_host = None
        return self._first_ranks(batch)

    def digest(self) -> int:
        """Of the present batch, the same on all ranks where they have the same; 0 for those that were compared."""
        if not self._described and self._sample is None:
            return 0
        return _digest_of(self._described, self._sample)

    def values_of(self, numbers: Tensor) -> list[float]:
        """The values of a vector of 64-bit floats; if it is on a device, the sample comes in the same copy."""
        sample = self._sample
        values: list[float]
        if sample is None or sample.device != numbers.device:
            values = numbers.tolist()
            return values
        both = torch.cat([numbers.view(torch.uint8), sample]).cpu()
        self._sample = both[8 * len(numbers) :]
        values = both[: 8 * len(numbers)].view(torch.float64).tolist()
        return values

    def _are_equal(self, batch: Any) -> bool:
        """Whether all ranks have the same values in their ``batch``, by a digest of all of them. Collective."""
        digests = gather(full_digest(batch), self._group)
        return all(other == digests[0] for other in digests)

    def _first_ranks(self, batch: Any) -> Any:
        """The ``batch`` of the first rank, on every rank's own device. Collective.

        Raises:
            ValueError: on every rank, where it cannot be pickled.
        """
        # by way of the host: what is on a device would arrive on the first rank's
        sent = map_leaves(self._off_device, batch) if self._group.rank() == 0 else None
        try:
            received = broadcast(sent, self._group)
        except UnsendableError as error:
            raise ValueError(
                f"The ranks of a pipeline have different batches, and that of the first cannot be sent: {error}. {CURE}"
            ) from error
        if self._group.rank() == 0:
            return batch
        return map_leaves(self._on_device, received)

    def _off_device(self, leaf: Any) -> Any:
        if self._device.type != "cpu" and getattr(leaf, "device", None) == self._device:
            return _Moved(leaf.to("cpu"))
        return leaf

    def _on_device(self, leaf: Any) -> Any:
        if isinstance(leaf, _Moved):
            return leaf.value.to(self._device)
        return leaf


class _Moved:
    """What was on the device."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Pickler(pickle.Pickler):
    """Describes an object by what is in it, for a comparison alone: nobody reads it back."""

    def persistent_id(self, obj: Any) -> Any:
        """A dense tensor counts by its elements, not by the memory that it is a part of; classes by their names."""
        if isinstance(obj, (type, FunctionType)):
            return obj.__module__, obj.__qualname__
        if not isinstance(obj, Tensor) or not _is_dense(obj):
            return None
        content = hashlib.blake2b(_bytes_of(obj).cpu().numpy().data, digest_size=8).digest()
        return type(obj).__name__, str(obj.dtype), tuple(obj.shape), obj.requires_grad, content

    def reducer_override(self, obj: Any) -> Any:
        """What cannot be pickled, such as a lock, counts by its type."""
        try:
            return obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        except TypeError:
            return str, (type(obj).__qualname__,)


def full_digest(batch: Any) -> int:
    """A number that is another one for nearly every other batch.

    Equal sets of strings may have other ones in other processes, as their order differs there.
    """
    described = io.BytesIO()
    _Pickler(described).dump(batch)
    return _number(hashlib.blake2b(described.getbuffer(), digest_size=8))


def sampled_digest(batch: Any) -> int:
    """The same by shapes and a few elements of tensors, plain values, and types of other objects."""
    return _digest_of(*_sampled(batch))


def _sampled(batch: Any) -> tuple[bytes, Tensor | None]:
    """What tells batches apart: a text, and a few elements of tensors, as bytes, on the device of the first."""
    described: list[str] = []
    samples: list[Tensor] = []
    for leaf in leaves(batch):
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, Tensor):
            described.append(f"{leaf.dtype}{'' if leaf.is_nested else list(leaf.shape)}")
            if _is_dense(leaf) and leaf.numel():
                flat = leaf.detach().reshape(-1)
                samples.append(_bytes_of(flat[:: -(-len(flat) // _SAMPLED)]))
        elif isinstance(leaf, (str, bytes, int, float, bool, complex, type(None))):
            described.append(repr(leaf))
        else:
            described.append(type(leaf).__qualname__)
    sample = torch.cat([sample.to(samples[0].device) for sample in samples]) if samples else None
    return "".join(described).encode(), sample


def _digest_of(described: bytes, sample: Tensor | None) -> int:
    digest = hashlib.blake2b(described, digest_size=8)
    if sample is not None:
        digest.update(sample.cpu().numpy().data)
    return _number(digest)


def _is_dense(tensor: Tensor) -> bool:
    return not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _number(digest: Any) -> int:
    """Of 62 bits, so that it can be sent as an int64."""
    return int.from_bytes(digest.digest(), "little") >> 2
