"""Tensors of a sharded checkpoint, by the planners, writer and reader of ``torch.distributed.checkpoint`` (DCP).

As in ``dcp.save`` each rank offers a local plan, a global plan says who writes what, each rank writes, and the first
writes ``.metadata``. What ranks tell each other is JSON; ``dcp.save`` itself sends pickles. Three things differ from
the classes that are extended here:

- writing holds one tensor on the host at a time (torch's writer keeps a rank's tensors until their file is complete);
- each tensor's ``torch.save`` archive begins at a multiple of 64 bytes, and so do its values;
- reading maps the files into memory instead of copying: what nobody uses is never read.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_smddp._compat.torch import dcp_storage_info
from lightning_smddp.checkpoint.errors import ANOTHER, CheckpointError
from lightning_smddp.checkpoint.files import new_file, require_as_written
from lightning_smddp.checkpoint.safe_metadata import read_metadata
from lightning_smddp.checkpoint.zip_files import BrokenZipError, require_whole
from lightning_smddp.wire.encode import Path, dtype_of, name_of_dtype

_ALIGNMENT = 64  # bytes: that to which torch aligns values within an archive
_BROKEN = (ValueError, RuntimeError, zipfile.BadZipFile, struct.error, AttributeError)


def _done(result: Any) -> Future[Any]:
    """What torch's writer and reader return: these have done all when they return."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def name_of(path: Path) -> str:
    """What DCP calls the tensor at ``path``."""
    return ".".join(path)


# ---- writing ----


def describe_tensors(tensors: Mapping[Path, Tensor]) -> list[Any]:
    """JSON for :func:`plan_writing`: path, dtype and shape of each tensor."""
    described = []
    for path, tensor in tensors.items():
        dtype = name_of_dtype(tensor.dtype)
        described.append([list(path), dtype, list(tensor.shape)])
    return described


def plan_writing(described: Sequence[Sequence[Any]]) -> tuple[list[SavePlan], Metadata]:
    """What each rank writes; a tensor that several ranks have is written by the first of them.

    Args:
        described: :func:`describe_tensors` of each rank.

    Returns:
        A plan for each rank, and what ``.metadata`` will contain but for where the tensors are.
    """
    # The planner looks at names, dtypes and shapes alone, so tensors without memory stand in for those of all ranks.
    local_plans = []
    for tensors in described:
        stand_ins: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        for path, dtype, shape in tensors:
            name = name_of(path)
            stand_ins[name] = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
            paths[name] = tuple(path)
        plan = create_default_local_save_plan(stand_ins, is_coordinator=True)
        local_plans.append(replace(plan, planner_data=paths))
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    plans, metadata = planner.create_global_plan(local_plans)
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        # Without the strides that torch 2.15 notes: what is written is contiguous.
        bare = replace(stored, properties=TensorProperties(dtype=stored.properties.dtype))
        metadata.state_dict_metadata[name] = bare
    return plans, metadata


class BareTensors(DefaultSavePlanner):
    """Gives the writer tensors as ``torch.save`` needs them for a file that contains their values and no more."""

    def __init__(self, tensors: Mapping[Path, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        by_name = {name_of(path): tensor for path, tensor in tensors.items()}
        self.set_up_planner(by_name)

    def transform_object(self, write_item: WriteItem, object: Tensor) -> Tensor:
        """On the CPU, contiguous, alone in its memory, and without a flag that its values are to be conjugated."""
        bare = object.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # Of a view `torch.save` writes the whole memory that it is a view of.
        if bare.untyped_storage().nbytes() == bare.nbytes:
            return bare
        return bare.clone()


class TensorWriter(FileSystemWriter):
    """Writes one rank's tensors to ``files`` files of about equal size, and reads them back.

    Args:
        directory: exists, and has none of these files.
        rank: its files are ``__<rank>_<number>.distcp``.
        files: how many, at most.
    """

    def __init__(self, directory: str, rank: int, files: int) -> None:
        super().__init__(directory)
        self.directory = directory
        self._prefix = f"__{rank}_"
        self._files = files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's tensors one after the other.

        Raises:
            OSError: as the system reports it, or as what was read back differs.
        """
        results: list[WriteResult] = []
        pieces = _divide(plan.items, self._files)
        for number, items in enumerate(pieces):
            results += self._write_file(f"{self._prefix}{number}.distcp", items, planner)
        return _done(results)

    def _write_file(
        self,
        name: str,
        items: Sequence[WriteItem],
        planner: SavePlanner,
    ) -> list[WriteResult]:
        results = []
        path = os.path.join(self.directory, name)
        with new_file(path) as file:
            for item in items:
                # Values are aligned within their archive. Where that begins at a multiple of the same, they are so in
                # the file, and in mapped memory.
                padding = -file.size % _ALIGNMENT
                file.write(bytes(padding))
                begin = file.size
                tensor = planner.resolve_data(item)
                torch.save(tensor, cast(IO[bytes], file))  # of a file it needs `write` only
                del tensor  # a copy on the host, before the next one is made
                length = file.size - begin
                place = dcp_storage_info(name, begin, length)
                results.append(WriteResult(item.index, length, place))
        # From the disk: `new_file` has dropped the pages that were cached.
        with MappedFile(path) as written:
            for result in results:
                require_as_written(written.part(result.storage_data))
        return results

    def storage_meta(self) -> StorageMeta | None:
        """None: torch would note the temporary directory's name."""
        return None


def _divide(items: Sequence[WriteItem], files: int) -> list[list[WriteItem]]:
    """Into pieces of about equal size, in order."""
    sizes = [item.tensor_storage_size() or 0 for item in items]
    total = max(1, sum(sizes))
    pieces: list[list[WriteItem]] = [[] for _ in range(files)]
    # An item belongs to the piece in which its first byte is, if all bytes are cut into equal ones.
    before = 0
    for item, size in zip(items, sizes, strict=True):
        number = before * files // total
        pieces[min(number, files - 1)].append(item)  # behind the last byte there may be empty tensors
        before += size
    return [piece for piece in pieces if piece]


def results_to_json(results: Sequence[WriteResult]) -> list[Any]:
    """For the rank that writes ``.metadata``: name, number of dimensions, file, begin and length of each tensor."""
    told = []
    for result in results:
        index = result.index
        stored = result.storage_data
        dimensions = len(index.offset or ())
        told.append(
            [
                index.fqn,
                dimensions,
                stored.relative_path,
                stored.offset,
                stored.length,
            ]
        )
    return told


def results_from_json(told: Sequence[Any]) -> list[WriteResult]:
    """The inverse of :func:`results_to_json`."""
    results = []
    for name, dimensions, file, begin, length in told:
        index = MetadataIndex(name, [0] * dimensions, 0)
        place = dcp_storage_info(file, begin, length)
        results.append(WriteResult(index, length, place))
    return results


# ---- reading ----


def load_tensors(directory: str) -> dict[Path, Tensor]:
    """All tensors, as memory that is read from the files when it is used, and may be changed without changing them.

    A file stays open for as long as one of its tensors is there.

    Raises:
        CheckpointError: ``.metadata`` cannot be used, or a file does not contain what it says.
    """
    reader = TensorReader(directory)
    planner = MappedTensors()
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner)
    tensors = {}
    for name, tensor in planner.state_dict.items():
        tensors[metadata.planner_data[name]] = tensor
    return tensors


class MappedTensors(DefaultLoadPlanner):
    """Asks for all tensors of a checkpoint, and keeps what the reader gives instead of copying it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fill ``state_dict`` with tensors without memory, for which the reader is asked but for those of no values."""
        # What is on meta is replaced by what is read; a tensor without values is not asked for, and stays.
        assert metadata is not None
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            device = "cpu" if stored.size.numel() == 0 else "meta"
            state_dict[name] = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Keep a tensor that was read."""
        self.state_dict[read_item.dest_index.fqn] = tensor


class TensorReader(FileSystemReader):
    """Reads without unpickling, and maps whole tensors into memory."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.directory = directory

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See :func:`~lightning_smddp.checkpoint.safe_metadata.read_metadata`."""
        return read_metadata(self.directory)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Give the planner each tensor that it asks for.

        Raises:
            CheckpointError: it is not in its file.
        """
        files: dict[str, MappedFile] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            name = stored.relative_path
            path = os.path.join(self.directory, name)
            if name not in files:
                files[name] = MappedFile(path)
            try:
                like = planner.resolve_tensor(item)
                tensor = _map_tensor(files[name], stored, like)
            except _BROKEN as error:
                raise _misplaced(path, item.storage_index.fqn) from error
            planner.commit_tensor(item, tensor)
        return _done(None)


def verify_tensors(directory: str, rank: int = 0, ranks: int = 1) -> None:
    """Compare the checksums of this rank's share of the tensors, which reads them.

    Raises:
        CheckpointError: one is damaged; it names the file.
    """
    # The largest first, dealt out like cards: so the shares are about equal.
    stored = list(read_metadata(directory).storage_data.items())
    stored.sort(key=lambda pair: pair[1].length, reverse=True)
    for index, info in stored[rank::ranks]:
        path = os.path.join(directory, info.relative_path)
        try:
            with MappedFile(path) as file:
                require_whole(file.part(info))
        except BrokenZipError as error:
            reason = f"{index.fqn} in it is damaged: a checksum, or the table of contents of its archive, is wrong"
            raise CheckpointError(path, reason, ANOTHER) from error
        except ValueError as error:
            raise _misplaced(path, index.fqn) from error


def _misplaced(path: str, name: str) -> CheckpointError:
    return CheckpointError(path, f"{name} is not at its place in the file", ANOTHER)


def _map_tensor(file: MappedFile, stored: Any, like: Tensor) -> Tensor:
    """A tensor of the dtype and shape of ``like`` whose memory is the mapped file, which it keeps open."""
    size = like.nbytes
    begin, length = _find_values(file.part(stored))
    # What a file says of itself is not trusted: the values have to be inside of the tensor's own archive.
    if length != size or not 0 <= begin <= stored.length - size:
        raise ValueError(f"{length} bytes for {size}")
    data = torch.frombuffer(
        file.memory,
        dtype=torch.uint8,
        count=size,
        offset=stored.offset + begin,
    )
    return data.view(like.dtype).view(like.shape)


def _find_values(archive: IO[bytes]) -> tuple[int, int]:
    """Where in a ``torch.save`` archive of one tensor its values are: begin and length."""
    with zipfile.ZipFile(archive) as records:
        found = [info for info in records.infolist() if info.filename.endswith("/data/0")]
    if not found:
        raise ValueError("no values")
    info = found[0]
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed values")
    # A record begins with a header of 30 bytes, its name, and extra bytes by which torch aligns the values. The last
    # four bytes of the header are the lengths of these two.
    archive.seek(info.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", archive.read(4))
    begin = info.header_offset + 30 + name_length + extra_length
    return begin, info.file_size


class MappedFile:
    """A file in memory, read where it is used; changes of that memory stay there."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.memory.close()

    def part(self, stored: Any) -> IO[bytes]:
        """An archive in it, as a file."""
        return cast(IO[bytes], _Part(self.memory, stored.offset, stored.length))


class _Part(io.RawIOBase):
    """Some bytes of a mapped file as a file, without a copy of them."""

    def __init__(self, memory: mmap.mmap, begin: int, length: int) -> None:
        end = begin + length
        if begin < 0 or length < 0 or end > len(memory):
            raise ValueError(f"bytes {begin} to {end} of {len(memory)}")
        self._memory = memory
        self._begin = begin
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += self._length
        self._position = max(0, offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._length - self._position)
        count = min(len(buffer), left)
        begin = self._begin + self._position
        buffer[:count] = self._memory[begin : begin + count]
        self._position += count
        return count
