"""Tensors in a directory of ``torch.distributed.checkpoint``, read when they are asked for.

Torch's own loading unpickles ``.metadata`` and every entry that is no tensor. Here ``.metadata`` can make torch's
description of tensors and nothing else, and entries that are no tensors are refused: our directories have none.
"""

from __future__ import annotations

import os
import pickle
from collections import UserDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from typing_extensions import override

from lightning_smddp.checkpoint.files import ANOTHER, CheckpointError
from lightning_smddp.checkpoint.parts import filled, stored_in

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata.{name}"
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {f"{_DCP}.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"} | {
    "pathlib.PosixPath", "pathlib._local.PosixPath",
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Makes what describes tensors, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data; nothing of it was run")
        return super().find_class(module, name)


class Directory:
    """The tensors of a directory.

    Raises:
        CheckpointError: ``.metadata`` is damaged, or contains something else than a description of tensors; a file of
            it is missing or cut off.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(os.path.join(path, METADATA), "rb") as file:
                self.metadata: Metadata = _Unpickler(file).load()
            self._reader = FileSystemReader(path)
            self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        except Exception as error:  # whatever a damaged pickle leads to
            raise CheckpointError(path, f"has a {METADATA} that cannot be used: {error}", ANOTHER) from error
        for stored in self._reader.storage_data.values():
            file_path = os.path.join(path, stored.relative_path)
            if not os.path.exists(file_path) or os.path.getsize(file_path) < stored.offset + stored.length:
                raise CheckpointError(file_path, "is missing or cut off. Each rank has to see all files", ANOTHER)

    def read(self, names: Iterable[str], device: str = "cpu") -> dict[str, Tensor]:
        """Tensors by name; on ``meta`` nothing is read."""
        tensors = {}
        try:
            for name in names:
                stored = self.metadata.state_dict_metadata[name]
                if not isinstance(stored, TensorStorageMetadata):
                    raise ValueError(f"{name} is a pickle, which can run any code; it was not read")
                tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
            if device != "meta":
                planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
                planner.set_up_planner(tensors, self.metadata, is_coordinator=True)
                self._reader.read_data(planner.create_local_plan(), planner)
        except Exception as error:  # of damaged files anything
            raise CheckpointError(self.path, f"cannot be read: {type(error).__name__}: {error}", ANOTHER) from error
        return tensors


class Stored(UserDict[Any, Any]):
    """A part of a checkpoint whose tensors are in a directory: each is read when it is asked for, and not kept.

    Hooks of the user's may change it as the dict that it stands for.
    """

    def __init__(self, directory: Directory, values: dict[Any, Any]) -> None:
        super().__init__()
        self.data = values
        self._directory = directory

    def read(self, keys: Iterable[Any], device: str = "cpu") -> dict[Any, Any]:
        """Values of ``keys``, in which tied tensors are one; on ``meta`` their shapes alone, without reading."""
        values = {key: self.data[key] for key in keys}
        tensors = self._directory.read(stored_in(values), device)
        found: dict[Any, Any] = filled(values, tensors.__getitem__)
        return found

    @override
    def __getitem__(self, key: Any) -> Any:
        return self.read([key])[key]
