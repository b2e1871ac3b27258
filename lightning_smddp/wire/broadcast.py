"""A value of one rank, on all ranks of its group: plain data, or a nested structure.

A structure goes as a header in JSON, which says how it is built, and one buffer with its numbers and tensors. So the
header of a step's results is the same at every step and need not be sent again: a :class:`HeaderCache` makes that one
collective.

    buffer:  | length of a new header that follows, or 0 (8 bytes) | numbers, 8 bytes each | tensor | tensor | ...

Whoever receives a header has to read it, and waits for the device if it comes from there. With a channel from host to
host all but the tensors of devices goes over that one, and these follow in a buffer that nobody reads.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.wire.encode import Encoder, Path, UnknownTypeError, decode, dtype_of, name_of_dtype
from lightning_smddp.wire.gather import from_bytes, to_bytes
from lightning_smddp.wire.pytree import items, leaves, rebuild

_ALIGNMENT = 16  # bytes, the largest element's size: a part of the buffer can be viewed as any type
_SMALL = 2**16  # bytes of a buffer that may be sent in vain, because the header has changed
_HOST, _DEVICE, _APART = "host", "device", "apart"  # where a tensor was; apart: in the second buffer


def broadcast_json(
    value: Any,
    group: dist.ProcessGroup,
    device: torch.device,
    group_src: int = 0,
) -> Any:
    """The ``value`` (anything that JSON carries) of the rank ``group_src`` of ``group`` on every rank. Collective."""
    # The others do not know how long the value is: so the length first.
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


class _TensorSpec(NamedTuple):
    """A tensor to come: its path in the structure, its dtype's name, its shape, and where it is (``_HOST``, ...)."""

    path: Path
    dtype: str
    shape: Sequence[int]
    where: str

    @property
    def nbytes(self) -> int:
        nbytes: int = dtype_of(self.dtype).itemsize
        for size in self.shape:
            nbytes *= size
        return nbytes


@dataclass(frozen=True)
class _Layout:
    """What is where in the two buffers, in bytes.

    Attributes:
        head: bytes in front of the first tensor: the length of a header, and the numbers.
        offsets: of each tensor in its buffer.
        sizes: of each tensor.
        nbytes: of the first buffer.
        nbytes_apart: of the second one.
    """

    head: int
    offsets: list[int]
    sizes: list[int]
    nbytes: int
    nbytes_apart: int

    @classmethod
    def of(cls, specs: Sequence[_TensorSpec], numbers: int) -> _Layout:
        head = 8 + 8 * numbers
        end = _aligned(head)
        end_apart = 0
        sizes = [spec.nbytes for spec in specs]
        offsets = []
        for spec, size in zip(specs, sizes, strict=True):
            if spec.where == _APART:
                offsets.append(end_apart)
                end_apart = _aligned(end_apart + size)
            else:
                offsets.append(end)
                end = _aligned(end + size)
        return cls(head, offsets, sizes, end, end_apart)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class _Header:
    """What a rank has to know to receive a structure."""

    text: str  # as it is sent
    tree: Any
    specs: list[_TensorSpec]
    layout: _Layout

    @property
    def has_apart(self) -> bool:
        """Whether a second buffer follows the first one. It may be empty, as tensors may be."""
        return any(spec.where == _APART for spec in self.specs)

    @classmethod
    def parse(cls, text: str, parsed: dict[str, Any]) -> _Header:
        specs = []
        for path, dtype, shape, where in parsed["tensors"]:
            specs.append(_TensorSpec(tuple(path), dtype, shape, where))
        layout = _Layout.of(specs, parsed["numbers"])
        return cls(text, parsed["tree"], specs, layout)


@dataclass
class HeaderCache:
    """The last header, kept by the caller on every rank of a group, one for each kind of structure it broadcasts."""

    header: _Header | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the last buffer."""
        if self.header is None:
            return _ALIGNMENT
        return self.header.layout.nbytes

    @property
    def notice_nbytes(self) -> int:
        """Bytes of the first message: a buffer like the last one if it is small, else only the word that it comes."""
        if self.nbytes <= _SMALL:
            return self.nbytes
        return _ALIGNMENT

    def forget(self) -> None:
        """The next value is sent with a header of its own, however like the last one it is."""
        self.header = None


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
    if cache is None:
        cache = HeaderCache()
    if host is None:
        host = Channel(group, device)
    way = _Way(group, src, device, cache, host)
    if group.rank() == src:
        _send(value, way)
        return value
    return in_containers_of(like, _receive(way))


def in_containers_of(like: Any, value: Any) -> Any:
    """The leaves of ``value`` in containers like those of ``like``; ``value`` itself if keys or lengths differ."""
    if like is None:
        return value
    paths_of_like = [path for path, _ in items(like)]
    paths = [path for path, _ in items(value)]
    if paths_of_like != paths:
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
        """Broadcast memory that the host reads or writes, over a group for host memory."""
        dist.broadcast(data, group=self.host.group, group_src=self.src)

    def broadcast_apart(self, data: Tensor) -> None:
        """Broadcast a tensor that stays on its device, over that device's group."""
        dist.broadcast(data, group=self.group, group_src=self.src)

    def received(self, nbytes: int) -> Tensor:
        """What the host reads, where it is received."""
        data = torch.empty(nbytes, dtype=torch.uint8, device=self.host.device)
        self.broadcast(data)
        return data


# ---- the sender ----


def _send(value: Any, way: _Way) -> None:
    cache = way.cache
    encoder = Encoder(is_structure=True)
    try:
        header = _header_of(value, encoder, way)
    except UnknownTypeError as error:
        text = f"{_where(error.path)} {error.problem}"
        _send_header(json.dumps({"error": text}), way)
        cache.forget()
        raise UnsendableError(text) from error
    # The others wait for a message as long as the last buffer, if that was small, else for a notice. There are three
    # cases, of which they tell the first apart by the length that it begins with:
    #     header is new:     notice (its length) | header | buffer
    #     same, and small:                                  buffer (begins with 0, and is the notice itself)
    #     same, and large:   notice (0)          |          buffer
    layout = header.layout
    if header is not cache.header:
        _send_header(header.text, way)
    elif layout.nbytes != cache.notice_nbytes:
        way.broadcast(_notice(0, way))
    head = struct.pack("<q", 0) + b"".join(encoder.numbers)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=way.host.device)
    head_bytes = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    buffer[: layout.head].copy_(head_bytes, non_blocking=True)
    apart = torch.empty(layout.nbytes_apart, dtype=torch.uint8, device=way.device)
    for spec, tensor, offset in zip(header.specs, encoder.tensors.values(), layout.offsets, strict=True):
        target = buffer
        if spec.where == _APART:
            target = apart
        _write(target, offset, tensor)
    way.broadcast(buffer)
    if header.has_apart:
        way.broadcast_apart(apart)
    cache.header = header


def _header_of(value: Any, encoder: Encoder, way: _Way) -> _Header:
    """The header of ``value``: the cached one where that is the same."""
    tree = encoder.encode(value)
    specs = []
    for path, tensor in encoder.tensors.items():
        if tensor.device.type == "cpu":
            where = _HOST
        elif way.is_split:
            where = _APART
        else:
            where = _DEVICE
        specs.append(_TensorSpec(path, name_of_dtype(tensor.dtype), tuple(tensor.shape), where))
    numbers = len(encoder.numbers)
    text = json.dumps({"tree": tree, "tensors": specs, "numbers": numbers})
    known = way.cache.header
    if known is not None and known.text == text:
        return known
    return _Header(text, tree, specs, _Layout.of(specs, numbers))


def _write(buffer: Tensor, offset: int, tensor: Tensor) -> None:
    """The bytes of ``tensor`` into ``buffer``."""
    # Bytes as they are in memory: of a lazily conjugated or negated tensor they would be those of another one.
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    buffer[offset : offset + flat.numel()].copy_(flat)


def _send_header(header: str, way: _Way) -> None:
    text = bytearray(header.encode())
    data = torch.frombuffer(text, dtype=torch.uint8).to(way.host.device)
    way.broadcast(_notice(data.numel(), way))
    way.broadcast(data)


def _notice(length: int, way: _Way) -> Tensor:
    """The length of the header that follows (0: none), as long as what the others wait for."""
    notice = torch.zeros(way.cache.notice_nbytes, dtype=torch.uint8, device=way.host.device)
    packed = bytearray(struct.pack("<q", length))
    notice[:8] = torch.frombuffer(packed, dtype=torch.uint8)
    return notice


# ---- the receivers ----


def _receive(way: _Way) -> Any:
    cache = way.cache
    # The first message is the buffer itself, if nothing has changed and it is small. Reading it waits for the device:
    # so what is read of a buffer is read at once.
    expected = cache.header
    buffer = way.received(cache.notice_nbytes)
    head_nbytes = 8
    if expected is not None:
        head_nbytes = expected.layout.head
    head = _bytes(buffer[:head_nbytes])
    (length,) = struct.unpack("<q", head[:8])
    if length:
        text = _bytes(way.received(length)).decode()
        _take_header(text, cache)
    header = cache.header
    assert header is not None
    if length or cache.nbytes != buffer.numel():
        buffer = way.received(cache.nbytes)
        head = _bytes(buffer[: header.layout.head])
    apart = torch.empty(header.layout.nbytes_apart, dtype=torch.uint8, device=way.device)
    if header.has_apart:
        way.broadcast_apart(apart)
    return decode(header.tree, _tensors(header, buffer, apart), head[8:])


def _take_header(text: str, cache: HeaderCache) -> None:
    parsed = json.loads(text)
    if "error" in parsed:
        cache.forget()
        raise UnsendableError(parsed["error"])
    cache.header = _Header.parse(text, parsed)


def _bytes(data: Tensor) -> bytes:
    return bytes(data.cpu().numpy())


def _tensors(header: _Header, buffer: Tensor, apart: Tensor) -> dict[Path, Tensor]:
    """The tensors in the buffers, by path; those that would keep alive more than as much again are copied out."""
    found: dict[Path, Tensor] = {}
    layout = header.layout
    for spec, offset, size in zip(header.specs, layout.offsets, layout.sizes, strict=True):
        source = buffer
        if spec.where == _APART:
            source = apart
        data = source[offset : offset + size]
        part = data.view(dtype_of(spec.dtype)).view(spec.shape)
        if 2 * size < source.nbytes:
            own = part.clone()
        else:
            own = part.data  # with a version counter of its own
        if spec.where == _HOST:
            own = own.cpu()
        found[spec.path] = own
    return found


def _where(path: Sequence[Any]) -> str:
    if not path:
        return "The value"
    return "".join(f"[{key!r}]" for key in path)
