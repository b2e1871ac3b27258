"""Files of tensors in the format of ``torch.distributed.checkpoint``: several ``torch.save`` archives in one file.

Written without its collectives, which unpickle what other ranks send. Each archive begins at a multiple of 64 bytes,
so that its values do too and can be used in place: a file is mapped into memory, and only what is used is read.
"""

from __future__ import annotations

import errno
import hashlib
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

from lightning_smddp._compat import dcp_place
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.communication.trees import Path, dtype_of, name_of_dtype

METADATA = ".metadata"
_ALIGNMENT = 64
_PIECE = 2 * 2**20
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


class HashedFile:
    """A new file that knows the SHA-256 of what was written to it. Complete when its context is left.

    Attributes:
        size: Bytes written.
        digest: In hexadecimal, at the end.

    Raises:
        OSError: as the system reports it; torch replaces errors of ``write`` by one of its own. Also with ``verify``,
            when what is read back from the disk differs.
    """

    def __init__(self, path: str, verify: bool = True) -> None:
        self.size, self.digest = 0, ""
        self._path, self._verify = path, verify
        self._hash, self._error = hashlib.sha256(), cast("Exception | None", None)
        self._file = open(path, "xb", buffering=2**20)  # noqa: SIM115 (closed at exit)

    def write(self, data: Any) -> int:
        """Append ``data`` (bytes-like)."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _PIECE):
                self._hash.update(view[start : start + _PIECE])
                self._file.write(view[start : start + _PIECE])
        except Exception as error:
            self._error = self._error or error
            raise
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing; called by ``torch.save``."""

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        with self._file:
            if self._error is not None and error is not None:
                raise self._error from None
            if error is not None:
                return
            self._file.flush()
            os.fsync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read the disk, not the cache
        self.digest = self._hash.hexdigest()
        if self._verify and digest_of(self._path) != self.digest:
            raise OSError(errno.EIO, "what was read back differs from what was written", self._path)


def digest_of(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def write_tensors(
    directory: str, name: str, tensors: Mapping[Path, Tensor], verify: bool
) -> tuple[HashedFile, list[Entry]]:
    """Write tensors to one file, one after the other: no more than one is copied at a time."""
    entries = []
    with HashedFile(os.path.join(directory, name), verify) as file:
        for path, tensor in tensors.items():
            file.write(bytes(-file.size % _ALIGNMENT))
            begin = file.size
            torch.save(_bare(tensor), cast(IO[bytes], file))  # of a file it needs `write` only
            dtype = name_of_dtype(tensor.dtype)
            entries.append(Entry(path, dtype, tuple(tensor.shape), name, begin, file.size - begin))
    return file, entries


def _bare(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and with no more memory than it needs, which ``torch.save`` would write too."""
    bare = tensor.detach().cpu().contiguous()
    return bare if bare.untyped_storage().nbytes() == bare.nbytes else bare.clone()


def write_metadata(directory: str, entries: Iterable[Entry], verify: bool) -> HashedFile:
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
    with HashedFile(os.path.join(directory, METADATA), verify) as file:
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
