"""A nested structure of one rank, on all ranks of its group: a header in JSON and one buffer for everything else.

The header says how the structure is built; strings and booleans are in it. Numbers and tensors are in the buffer, so
that the header of a step's results is the same at every step and need not be sent again: a :class:`HeaderCache`
makes that one collective. Nothing received is unpickled.

Whoever receives a header has to read it, and waits for the device if it comes from there. With a channel from host to
host all but the tensors of devices goes over that one, and these follow in a buffer that nobody reads.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.wire.encode import dtype_of, name_of_dtype
from lightning_smddp.wire.gather import from_bytes, to_bytes
from lightning_smddp.wire.pytree import Path, items, leaves, rebuild

_ALIGNMENT = 16  # bytes, the largest element's size: a part of the buffer can be viewed as any type
_SMALL = 2**16  # bytes of a buffer that may be sent in vain, because the header has changed
_INT64 = range(-(2**63), 2**63)


def broadcast_json(value: Any, group: dist.ProcessGroup, device: torch.device, group_src: int = 0) -> Any:
    """The ``value`` of the rank ``group_src`` of ``group`` (the first) on every rank."""
    data = to_bytes(value, device)
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, group=group, group_src=group_src)
    if group.rank() != group_src:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, group=group, group_src=group_src)
    return from_bytes(data)


class Channel(NamedTuple):
    """A process group, and where its collectives take their tensors from."""

    group: dist.ProcessGroup
    device: torch.device


class UnsendableError(ValueError):
    """Something in a structure cannot be sent to other ranks."""


@dataclass
class HeaderCache:
    """The last header, kept by the caller on every rank of a group, one for each kind of structure it broadcasts."""

    header: str = ""
    parsed: dict[str, Any] = field(default_factory=dict)  # the header, where it was received
    nbytes: int = _ALIGNMENT  # of the last buffer

    @property
    def notice_nbytes(self) -> int:
        """Bytes of the first message: a buffer like the last one if it is small, else only the word that it comes."""
        return self.nbytes if self.nbytes <= _SMALL else _ALIGNMENT

    def forget(self) -> None:
        """The next value is sent with a header of its own, however like the last one it is."""
        self.header, self.parsed, self.nbytes = "", {}, _ALIGNMENT


def broadcast_structure(
    value: Any,
    group: dist.ProcessGroup,
    src: int,
    device: torch.device,
    *,
    cache: HeaderCache | None = None,
    like: Any = None,
    host: Channel | None = None,
) -> Any:
    """The ``value`` of the group's rank ``src``, on every rank. Collective.

    Takes dicts, lists, tuples, dataclasses (which arrive as dicts), None, booleans, numbers, strings, arrays and dense
    tensors, in any nesting. Tensors arrive without gradients, on ``device``, or on the CPU if they were there.

    Args:
        value: on ``src`` what to send, elsewhere anything.
        group: the ranks.
        src: rank in ``group``.
        device: where the group's collectives take their tensors from.
        cache: this rank's cache for structures of this kind, or None: three collectives every time. While header and
            cache agree it is one, or two for more than 64 KiB.
        like: a structure whose containers the received leaves are put into, if it has the same keys and lengths.
        host: the same ranks as ``group``, for what the host has to read.

    Returns:
        On ``src`` the ``value`` itself, elsewhere a copy.

    Raises:
        UnsendableError: on every rank: something in ``value`` cannot be sent; the message says where it is.
    """
    if group.size() == 1:
        return value
    way = _Way(group, src, device, HeaderCache() if cache is None else cache, host or Channel(group, device))
    if group.rank() == src:
        _send(value, way)
        return value
    return in_containers_of(like, _receive(way))


def in_containers_of(like: Any, value: Any) -> Any:
    """The leaves of ``value`` in containers like those of ``like``; ``value`` itself if keys or lengths differ."""
    if like is None or [path for path, _ in items(like)] != [path for path, _ in items(value)]:
        return value
    return rebuild(like, leaves(value))


@dataclass(frozen=True)
class _Way:
    """Who sends to whom, and how."""

    group: dist.ProcessGroup
    src: int
    device: torch.device
    cache: HeaderCache
    host: Channel

    @property
    def is_split(self) -> bool:
        """Whether tensors of devices go another way than the rest."""
        return self.host.device != self.device

    def broadcast(self, data: Tensor) -> None:
        """What the host reads."""
        dist.broadcast(data, group=self.host.group, group_src=self.src)

    def received(self, nbytes: int) -> Tensor:
        """The same where it is received."""
        data = torch.empty(nbytes, dtype=torch.uint8, device=self.host.device)
        self.broadcast(data)
        return data


def _send(value: Any, way: _Way) -> None:
    packing, cache = _Packing(way.is_split), way.cache
    try:
        header = json.dumps(packing.header(value))
    except ValueError as error:
        _send_header(json.dumps({"error": str(error)}), way)
        cache.forget()
        raise UnsendableError(str(error)) from error
    layout = _Layout.of(packing.specs, packing.count)
    if header != cache.header:
        _send_header(header, way)
    elif layout.nbytes != cache.notice_nbytes:
        way.broadcast(_notice(0, way))
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=way.host.device)
    buffer[: layout.head].copy_(torch.frombuffer(bytearray(packing.head()), dtype=torch.uint8), non_blocking=True)
    _fill(buffer, packing.tensors, layout.offsets)
    way.broadcast(buffer)
    if packing.apart:
        layout_apart = _Layout.of(packing.specs_apart, 0)
        apart = torch.empty(layout_apart.nbytes, dtype=torch.uint8, device=way.device)
        _fill(apart, packing.apart, layout_apart.offsets)
        dist.broadcast(apart, group=way.group, group_src=way.src)
    cache.header, cache.nbytes = header, layout.nbytes


def _fill(buffer: Tensor, tensors: list[Tensor], offsets: list[int]) -> None:
    for tensor, offset in zip(tensors, offsets, strict=True):
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
        buffer[offset : offset + flat.numel()].copy_(flat)


def _send_header(header: str, way: _Way) -> None:
    data = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8).to(way.host.device)
    way.broadcast(_notice(data.numel(), way))
    way.broadcast(data)


def _notice(length: int, way: _Way) -> Tensor:
    """The length of the header that follows (0: none), as long as what the others wait for."""
    notice = torch.zeros(way.cache.notice_nbytes, dtype=torch.uint8, device=way.host.device)
    notice[:8] = torch.frombuffer(bytearray(struct.pack("<q", length)), dtype=torch.uint8)
    return notice


def _receive(way: _Way) -> Any:
    cache = way.cache
    buffer = way.received(cache.notice_nbytes)
    head = _bytes(buffer[: 8 + 8 * cache.parsed.get("numbers", 0)])  # reading waits for the device: once, if it can be
    (length,) = struct.unpack("<q", head[:8])
    if length:
        _take_header(_bytes(way.received(length)).decode(), cache)
    if length or cache.nbytes != cache.notice_nbytes:
        buffer, head = way.received(cache.nbytes), head[:8]
    specs, numbers = cache.parsed["tensors"], cache.parsed["numbers"]
    if len(head) < 8 + 8 * numbers:
        head = _bytes(buffer[: 8 + 8 * numbers])
    return _Unpacking(head, _tensors(buffer, specs, numbers), _receive_apart(way)).decode(cache.parsed["tree"])


def _receive_apart(way: _Way) -> list[Tensor]:
    specs = way.cache.parsed["apart"]
    if not specs:
        return []
    data = torch.empty(_Layout.of(specs, 0).nbytes, dtype=torch.uint8, device=way.device)
    dist.broadcast(data, group=way.group, group_src=way.src)
    return _tensors(data, specs, 0)


def _take_header(header: str, cache: HeaderCache) -> None:
    parsed = json.loads(header)
    if "error" in parsed:
        cache.forget()
        raise UnsendableError(parsed["error"])
    cache.header, cache.parsed = header, parsed
    cache.nbytes = _Layout.of(parsed["tensors"], parsed["numbers"]).nbytes


def _bytes(data: Tensor) -> bytes:
    return bytes(data.cpu().numpy())


def _tensors(buffer: Tensor, specs: list[Any], numbers: int) -> list[Tensor]:
    """The tensors in the buffer; those that would keep alive more than as much again are copied out of it."""
    found = []
    for (dtype, shape, on_cpu), offset in zip(specs, _Layout.of(specs, numbers).offsets, strict=True):
        part = buffer[offset : offset + _nbytes(dtype, shape)].view(dtype_of(dtype)).view(shape)
        part = part.clone() if 2 * part.nbytes < buffer.nbytes else part.data  # `data`: its own version counter
        found.append(part.cpu() if on_cpu else part)
    return found


def _nbytes(dtype: str, shape: list[int]) -> int:
    nbytes: int = dtype_of(dtype).itemsize
    for size in shape:
        nbytes *= size
    return nbytes


@dataclass(frozen=True)
class _Layout:
    """Where things are in the buffer, in bytes: a flag of 8, the numbers, and each tensor at its offset."""

    head: int
    offsets: list[int]
    nbytes: int

    @classmethod
    def of(cls, specs: list[Any], numbers: int) -> _Layout:
        head = 8 + 8 * numbers
        end, offsets = _aligned(head), []
        for dtype, shape, _ in specs:
            offsets.append(end)
            end = _aligned(end + _nbytes(dtype, shape))
        return cls(head, offsets, end)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Packing:
    """Takes a structure apart into its header and what goes into the buffer; with ``is_split``, into two buffers."""

    is_split: bool
    tensors: list[Tensor] = field(default_factory=list)
    specs: list[Any] = field(default_factory=list)
    apart: list[Tensor] = field(default_factory=list)  # those of devices
    specs_apart: list[Any] = field(default_factory=list)
    numbers: list[bytes] = field(default_factory=list)

    def header(self, value: Any) -> dict[str, Any]:
        """What the others need to make room for ``value``: its structure, and the shapes of its tensors."""
        tree = self.encode(value, ())
        return {"tree": tree, "tensors": self.specs, "numbers": self.count, "apart": self.specs_apart}

    @property
    def count(self) -> int:
        return len(self.numbers)

    def head(self) -> bytes:
        return struct.pack("<q", 0) + b"".join(self.numbers)

    def encode(self, value: Any, path: Path) -> Any:
        """What stands for ``value`` in the header: lists for lists, objects for what JSON does not know."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, Tensor):
            self._require_dense(value, path)
            if self.is_split and value.device.type != "cpu":
                return {"p": self._add(value, self.apart, self.specs_apart)}
            return {"t": self._add(value, self.tensors, self.specs)}
        if isinstance(value, np.generic):
            return self.encode(value.item(), path)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"a": self._add(torch.from_numpy(np.ascontiguousarray(value)), self.tensors, self.specs)}
        if isinstance(value, int):
            return {"i": self._number("<q", value)} if value in _INT64 else int(value)
        if isinstance(value, float):
            return {"f": self._number("<d", value)}
        if isinstance(value, Mapping):
            return {"d": [[self._key(k, path), self.encode(v, (*path, k))] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            members = [self.encode(member, (*path, index)) for index, member in enumerate(value)]
            return members if isinstance(value, list) else {"u": members}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
            return {"d": [[name, self.encode(member, (*path, name))] for name, member in fields]}
        raise UnsendableError(
            f"{_where(path)} is a {type(value).__name__}, which cannot be sent to other ranks. "
            "Make it a tensor, a number, a string, or a dict, list or tuple of these."
        )

    @staticmethod
    def _require_dense(tensor: Tensor, path: Path) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else f"{tensor.layout} {tensor.dtype}"
            raise UnsendableError(f"{_where(path)} is a {kind} tensor; only dense tensors can be sent to other ranks.")

    @staticmethod
    def _add(tensor: Tensor, tensors: list[Tensor], specs: list[Any]) -> int:
        tensors.append(tensor)
        specs.append([name_of_dtype(tensor.dtype), list(tensor.shape), tensor.device.type == "cpu"])
        return len(tensors) - 1

    def _number(self, form: str, value: float) -> int:
        self.numbers.append(struct.pack(form, value))
        return len(self.numbers) - 1

    @staticmethod
    def _key(key: Any, path: Path) -> Any:
        if key is None or isinstance(key, (bool, int, float, str)):
            return key
        raise UnsendableError(
            f"{_where(path)} has the key {key!r}, a {type(key).__name__}, which cannot be sent to other ranks. "
            "Use strings or numbers."
        )


@dataclass
class _Unpacking:
    head: bytes
    tensors: list[Tensor]
    apart: list[Tensor]

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(member) for member in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "t":
            return self.tensors[content]
        if kind == "p":
            return self.apart[content]
        if kind == "a":
            return self.tensors[content].cpu().numpy()
        if kind in "if":
            return struct.unpack_from("<q" if kind == "i" else "<d", self.head, 8 + 8 * content)[0]
        if kind == "d":
            return {key: self.decode(member) for key, member in content}
        assert kind == "u"
        return tuple(self.decode(member) for member in content)


def _where(path: Path) -> str:
    return "The value" if not path else "".join(f"[{key!r}]" for key in path)
