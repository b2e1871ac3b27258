"""One batch for all ranks of a pipeline: that of the first, whatever samplers and augmentation gave the others.

Each rank has read its own batch. Whether all have the same is found by a checksum on each, and one small message. Where
samplers agree, as they nearly always do, nothing need be sent, and so a batch may be of any kind: graphs, tables,
packed sequences, objects of the user's.
"""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import GeneratorType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.capture.objects import is_plain, parts_of
from lightning_smddp.pipeline.runtime.host_values import HostOf, HostValues
from lightning_smddp.wire.broadcast import Channel, HeaderCache, UnsendableError, broadcast_structure
from lightning_smddp.wire.pytree import leaves, map_leaves

_SHORT = 64  # bytes of a description that are not hashed
_CHUNK = 2**22  # numbers of a tensor on an accelerator whose checksum is computed at once
_PART = 2**22  # bytes of a tensor on the host whose checksum one thread computes
_THREADS = 4
_BITS = 62  # of a fingerprint: two of them, one negative, are sent as int64

_BY_VALUE = (type(None), bool, int, float, complex, str, bytes, np.generic, torch.Size)
_ONCE = (GeneratorType, map, zip, filter)  # they give their entries once, but a step runs several times on a batch


class UnknownValuesError(Exception):
    """The host does not know what a tensor on a device holds."""


def fingerprint(value: Any, host_of: HostOf | None = None) -> int:
    """A number that is another one for nearly every other value: of types, structure and contents, at any depth.

    What an object does not tell even to ``pickle`` (a lock, say) counts by its type alone.

    Args:
        value: any.
        host_of: where the contents of tensors are looked up; else the device is asked, which waits for it.

    Raises:
        UnknownValuesError: ``host_of`` does not know a tensor.
    """
    description = _Description(host_of).of(value)
    digest = hashlib.blake2b(description, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _BITS)


def same_everywhere(value: Any, group: dist.ProcessGroup, device: torch.device | None = None) -> bool:
    """Whether all ranks of ``group``, whose collectives take tensors of ``device``, have an equal one. Collective."""
    number = fingerprint(value)
    return _are_equal(number, group, device or torch.device("cpu"))


def known_to_be_same(
    value: Any,
    host_of: HostOf,
    group: dist.ProcessGroup,
    device: torch.device,
) -> bool:
    """As :func:`same_everywhere`, by what hosts know: False as well where one does not know all of it. Collective."""
    try:
        number = fingerprint(value, host_of)
    except UnknownValuesError:
        number = -1 - group.rank()  # unlike any other rank's
    return _are_equal(number, group, device)


def _are_equal(number: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks have this number: one MAX of it and of its negative, which is a MIN. Collective."""
    # Equal numbers are the largest and the smallest of all at once: so no rank has to see those of all others.
    votes = from_numbers([number, -number], torch.int64, device)
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    highest, lowest = votes.tolist()
    return bool(highest == -lowest)


class _Description:
    """Bytes that describe an object. Equal objects have equal ones, in whatever way they share their parts.

    Where an object is a part of itself, its description there is how many levels up it is; one that is long is replaced
    by its digest, so that the descriptions of deep objects stay short.
    """

    def __init__(self, host_of: HostOf | None) -> None:
        self._host_of = host_of
        self._above: dict[int, int] = {}  # objects that the present one is a part of, and how deep they are
        self._known: dict[int, tuple[Any, bytes]] = {}  # objects are kept, so that no other one gets their identity

    def of(self, value: Any) -> bytes:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            numbers = np.ascontiguousarray(value).reshape(-1)
            checksum = zlib.crc32(numbers.view(np.uint8).data)
            text = f"{value.dtype}{value.shape}{checksum}"
            return _short(text.encode())
        if is_plain(value):
            text = f"{type(value).__name__} {_text(value)}"
            return _short(text.encode())
        if id(value) in self._above:
            levels_up = len(self._above) - self._above[id(value)]
            return f"in itself {levels_up}".encode()
        if id(value) not in self._known:
            self._known[id(value)] = value, self._parts(value)
        return self._known[id(value)][1]

    def _parts(self, value: Any) -> bytes:
        parts = parts_of(value)
        if parts is None:
            return type(value).__qualname__.encode()
        self._above[id(value)] = len(self._above)
        described = []
        for key, part in parts:
            described.append(self.of(key) + b"=" + self.of(part))
        del self._above[id(value)]
        if isinstance(value, (set, frozenset)):
            described.sort()  # their order differs from process to process
        members = b",".join(described)
        return _short(_kind(value).encode() + b"(" + members + b")")

    def _tensor(self, tensor: Tensor) -> bytes:
        # A subclass of the user's may compute in ways of its own; what is described are the numbers.
        plain = tensor.detach()
        if type(plain) is not Tensor and not plain.is_nested:
            plain = plain.as_subclass(Tensor)
        stored = _stored_tensors(plain)
        if stored:
            content = b"".join(map(self._tensor, stored))
        else:
            checksum = _checksum(self._readable(plain))
            content = str(checksum).encode()
        shape = ""
        if not plain.is_nested:  # a nested tensor's shape is that of its parts
            shape = str(list(plain.shape))
        about = f"{_kind(tensor)}{plain.dtype}{shape}{tensor.requires_grad}"
        return _short(about.encode() + content)

    def _readable(self, tensor: Tensor) -> Tensor:
        """``tensor``, or the same values where the host can read them."""
        if self._host_of is None:
            return tensor
        known = self._host_of(tensor)
        if known is None:
            raise UnknownValuesError
        return known


def _stored_tensors(tensor: Tensor) -> list[Tensor]:
    """What a sparse or nested tensor keeps its values and indices in; empty for a strided one."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _checksum(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    # Views that are conjugate or negative by a flag have other bytes than what they stand for.
    resolved = tensor.resolve_conj().resolve_neg()
    flat = resolved.contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return _checksum_on_host(flat)
    return _checksum_on_device(flat)


def _checksum_on_host(flat: Tensor) -> int:
    """The CRC-32 of the bytes; of many, the CRC-32 of those of their parts, by several threads."""
    data = flat.numpy().data
    if len(data) <= _PART:
        return zlib.crc32(data)
    parts = []
    for begin in range(0, len(data), _PART):
        parts.append(data[begin : begin + _PART])
    with ThreadPoolExecutor(_THREADS) as threads:
        checksums = list(threads.map(zlib.crc32, parts))  # which lets go of the interpreter's lock meanwhile
    return zlib.crc32(np.array(checksums, dtype=np.uint32).data)


def _checksum_on_device(flat: Tensor) -> int:
    """A sum of the bytes, each times another number, computed where they are."""
    # Factors differ, so that bytes which change places change the sum. In chunks, as each byte takes 8 while it is
    # worked on.
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _CHUNK):
        part = flat[begin : begin + _CHUNK].to(torch.int64)
        end = begin + part.numel()
        position = torch.arange(begin, end, device=flat.device)
        factor = (2 * position + 1) * 0x5851F42D4C957F2D  # overflows, as it should
        factor ^= factor >> 29
        total += ((part + 1) * factor).sum()
    return int(total)


def _kind(value: Any) -> str:
    if isinstance(value, dict):  # a ``defaultdict`` with the same entries is the same batch
        return "dict"
    return type(value).__qualname__


def _text(value: Any) -> str:
    """What tells a plain value from others, the same in each process: so no address, as in a function's ``repr``."""
    if isinstance(value, _BY_VALUE):
        return repr(value)
    return getattr(value, "__qualname__", None) or str(value)


def _short(text: bytes) -> bytes:
    if len(text) <= _SHORT:
        return text
    return hashlib.blake2b(text, digest_size=16).digest()


class RepeatableIterator:
    """An iterator over what another one gave. A copy that is made before the first entry is taken begins anew."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries
        self.position = 0

    def __iter__(self) -> RepeatableIterator:
        return self

    def __next__(self) -> Any:
        if self.position == len(self.entries):
            raise StopIteration
        entry = self.entries[self.position]
        self.position += 1
        return entry


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
        self._group = group
        self._device = device
        self._host = host or Channel(group, device)
        self._values = values or HostValues()
        self._caches: dict[Any, HeaderCache] = {}
        self._differ: set[Any] = set()  # kinds of batches that differed once, and will again: no need to compare them
        self._sends = True  # until a batch was of a kind that cannot be sent

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
        # What a host knows costs no wait for its device, so that is compared first. Where hosts do not know all, or
        # batches differ, the first rank's is sent. Only one that cannot be sent is compared as it is on the devices.
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
            return broadcast_structure(
                batch,
                self._group,
                0,
                self._device,
                cache=cache,
                like=batch,
                host=self._host,
            )
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
