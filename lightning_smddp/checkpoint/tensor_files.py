"""Files of tensors in the format of ``torch.distributed.checkpoint``: several ``torch.save`` archives in one file.

Written without its collectives, which unpickle what other ranks send. Each archive begins at a multiple of 64 bytes,
so that its values do too and can be used in place: a file is mapped into memory, and only what is used is read.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_smddp._compat.torch import dcp_place
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.hashing import HashingWriter, hashed_file
from lightning_smddp.wire.encode import Path, dtype_of, name_of_dtype

METADATA = ".metadata"
_ALIGNMENT = 64
_ANOTHER = "Use an earlier checkpoint, or another copy of this one."


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        path: its name, in parts.
        dtype: its dtype's, without ``torch.``.
        shape: its.
        file: name of the file.
        begin, length: of its archive there, in bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int

    def to_json(self) -> list[Any]:
        """As JSON."""
        return [list(self.path), self.dtype, list(self.shape), self.file, self.begin, self.length]

    @classmethod
    def from_json(cls, told: list[Any]) -> Entry:
        """The inverse of :meth:`to_json`."""
        path, dtype, shape, *place = told
        return cls(tuple(path), dtype, tuple(shape), *place)


def write_tensors(directory: str, name: str, tensors: Mapping[Path, Tensor]) -> tuple[HashingWriter, list[Entry]]:
    """Write tensors to one file, one after the other: no more than one is copied at a time."""
    entries = []
    with hashed_file(os.path.join(directory, name)) as file:
        for path, tensor in tensors.items():
            file.write(bytes(-file.size % _ALIGNMENT))
            begin = file.size
            torch.save(_bare(tensor), cast(IO[bytes], file))  # of a file it needs `write` only
            dtype = name_of_dtype(tensor.dtype)
            entries.append(Entry(path, dtype, tuple(tensor.shape), name, begin, file.size - begin))
    return file, entries


def _bare(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and with no more memory than it needs, which ``torch.save`` would write too.

    Nor with a flag that its values are to be conjugated or negated, which the values in the file would lack.
    """
    bare = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bare if bare.untyped_storage().nbytes() == bare.nbytes else bare.clone()


def write_metadata(directory: str, entries: Iterable[Entry]) -> HashingWriter:
    """What ``torch.distributed.checkpoint`` needs in order to read these tensors: :class:`Metadata`, pickled."""
    metadata = Metadata({}, planner_data={}, storage_data={})
    for entry in entries:
        name, shape = ".".join(entry.path), torch.Size(entry.shape)
        zeros = torch.Size([0] * len(shape))
        properties = TensorProperties(dtype=dtype_of(entry.dtype))
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            properties, shape, [ChunkStorageMetadata(zeros, shape)]
        )
        metadata.planner_data[name] = entry.path
        place = dcp_place(entry.file, entry.begin, entry.length)
        metadata.storage_data[MetadataIndex(name, zeros, 0)] = place
    with hashed_file(os.path.join(directory, METADATA)) as file:
        pickle.dump(metadata, cast(IO[bytes], file))
    return file


def map_tensors(directory: str, entries: Iterable[Entry]) -> dict[Path, Tensor]:
    """The tensors, as memory that is read from the files when it is used, and may be changed without changing them.

    A file stays open for as long as one of its tensors is there.

    Raises:
        CheckpointError: what a file contains is not what ``entries`` say.
    """
    maps: dict[str, mmap.mmap] = {}
    tensors = {}
    for entry in entries:
        path = os.path.join(directory, entry.file)
        if entry.file not in maps:
            with open(path, "rb") as file:
                maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            tensors[entry.path] = _map_tensor(maps[entry.file], entry)
        except (ValueError, RuntimeError, zipfile.BadZipFile, struct.error, AttributeError, StopIteration) as error:
            reason = f"{'.'.join(entry.path)} is not at its place in the file"
            raise CheckpointError(path, reason, _ANOTHER) from error
    return tensors


def _map_tensor(file: mmap.mmap, entry: Entry) -> Tensor:
    dtype = dtype_of(entry.dtype)
    size = dtype.itemsize * torch.Size(entry.shape).numel()
    if size == 0:
        return torch.empty(entry.shape, dtype=dtype)
    begin, length = _record(_Slice(file, entry.begin, entry.length))
    if length != size or not 0 <= begin <= entry.length - size:
        raise ValueError(f"{length} bytes for {entry}")
    data = torch.frombuffer(file, dtype=torch.uint8, count=size, offset=entry.begin + begin)
    return data.view(dtype).view(entry.shape)


def _record(archive: _Slice) -> tuple[int, int]:
    """Where in a ``torch.save`` archive of one tensor its values are: begin and length."""
    with zipfile.ZipFile(cast(IO[bytes], archive)) as parts:
        info = next(info for info in parts.infolist() if info.filename.endswith("/data/0"))
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed values")
    archive.seek(info.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", archive.read(4))
    return info.header_offset + 30 + name_length + extra_length, info.file_size


class _Slice(io.RawIOBase):
    """A part of a mapped file, as a file; read without copying the whole."""

    def __init__(self, file: mmap.mmap, begin: int, length: int) -> None:
        if begin < 0 or length < 0 or begin + length > len(file):
            raise ValueError(f"bytes {begin} to {begin + length} of {len(file)}")
        self._view = memoryview(file)[begin : begin + length]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._view[self._position : self._position + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
