"""Reading ``.metadata`` of ``torch.distributed.checkpoint``, which is a pickle, without running what it says.

Only its own classes of plain data can be made. Entries that are pickles themselves ("bytes") are refused, as reading
them would run code; our directories have none.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_smddp._compat.torch import dcp_storage_info
from lightning_smddp.checkpoint.errors import ANOTHER, CheckpointError

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint."
_PROPERTIES = 5  # of a tensor: dtype, layout, whether it trains, memory format, pinning
_ALLOWED = {
    f"{_DCP}metadata.{name}"
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {f"{_DCP}filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"}  # fmt: skip
_DTYPES = {
    f"torch.{name}"
    for name in (
        "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "bool", "uint8", "uint16",
        "uint32", "uint64", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip

_PLAIN_CLASSES = (
    Metadata, MetadataIndex, TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.TensorProperties,
    dcp.ChunkStorageMetadata, dcp.StorageMeta, type(dcp_storage_info("", 0, 0)),
)  # fmt: skip


class _Refused(pickle.UnpicklingError):
    pass


_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Makes allowed things only, and gives attributes to instances of plain classes only.

    The private Python twin of ``pickle.Unpickler``, as that one lets nobody watch BUILD: a pickle could change the
    attributes of the very classes and functions that it may name, in torch, for the rest of the process.
    """

    def find_class(self, module: str, name: str) -> Any:
        # A `name` with dots is a path of attributes, which may lead to something else than the class of that name.
        full_name = f"{module}.{name}"
        if "." in name or full_name not in _ALLOWED | _DTYPES:
            raise _Refused(f"contains `{full_name}`, which is not plain data; nothing of it was run")
        return super().find_class(module, name)

    def load_build(self) -> None:
        # BUILD gives the state on top of the stack to the object below it.
        kind = type(self.stack[-2])
        if kind not in _PLAIN_CLASSES:
            raise _Refused(f"changes a {kind.__name__}, which is not plain data; it was not changed")
        if kind is dcp.TensorProperties:
            # torch 2.15 has strides behind, which ours do not need, nor an older torch know.
            self.stack[-1] = self.stack[-1][:_PROPERTIES]
        super().load_build()

    dispatch = {**_PythonUnpickler.dispatch, pickle.BUILD[0]: load_build}


def read_metadata(directory: str) -> Metadata:
    """What and where the tensors of a directory are; plain values in classes of torch's, made anew here.

    Raises:
        CheckpointError: ``.metadata`` has something else than tensors, whole in files of this directory.
    """
    path = os.path.join(directory, METADATA)
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
        if type(found) is not Metadata:
            raise _Refused(f"contains a {type(found).__name__}, not a checkpoint's metadata")
        clean = Metadata({}, planner_data={}, storage_data={})
        for name, stored in found.state_dict_metadata.items():
            _add_tensor(clean, str(name), stored, found)
        return clean
    except _Refused as error:
        raise CheckpointError(path, str(error), "Use a checkpoint from a source that you trust.") from error
    except OSError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        reason = f"is damaged, or not ours: {type(error).__name__}: {error}"
        raise CheckpointError(path, reason, ANOTHER) from error


def _add_tensor(clean: Metadata, name: str, stored: Any, found: Metadata) -> None:
    """Describe the tensor ``name`` anew in ``clean``: ``stored`` and ``found`` may hold anything."""
    if type(stored) is not TensorStorageMetadata:
        raise _Refused(f"has {name!r} as a pickle of its own, which can run any code when it is read; it was not read")
    if len(stored.chunks) != 1:
        raise ValueError(f"{name} is in {len(stored.chunks)} pieces")
    # Each tensor is one chunk, which begins at the origin.
    shape = torch.Size([int(size) for size in stored.size])
    origin = torch.Size([0] * len(shape))
    index = MetadataIndex(name, origin, 0)
    info = found.storage_data[index]
    file = info.relative_path
    if os.path.basename(file) != file:
        raise _Refused(f"refers to {file!r}, which is not in this directory")
    dtype = stored.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the type {dtype}")
    chunk = dcp.ChunkStorageMetadata(origin, shape)
    properties = dcp.TensorProperties(dtype=dtype)
    clean.state_dict_metadata[name] = TensorStorageMetadata(properties, shape, [chunk])
    path = [str(part) for part in found.planner_data[name]]
    clean.planner_data[name] = tuple(path)
    clean.storage_data[index] = dcp_storage_info(
        file,
        int(info.offset),
        int(info.length),
    )
