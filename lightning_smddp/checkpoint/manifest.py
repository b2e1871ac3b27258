"""``manifest.json``: sizes of a directory's files. Written last: without it there is no checkpoint.

The other files but one are made of zip files, which have checksums; ``.metadata`` has none, so its SHA-256 is here.
Version 1 had such hashes of all files; those are not looked at.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.files import new_file
from lightning_smddp.checkpoint.safe_metadata import METADATA

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "lightning-smddp sharded checkpoint", 2
_ANOTHER = "Use an earlier checkpoint, or another copy of this one."


@dataclass(frozen=True)
class Manifest:
    """Contents of a directory.

    Attributes:
        saved_ns: when it was saved, in nanoseconds since 1970.
        sizes: name of each file -> bytes.
        metadata_sha256: of ``.metadata``, in hexadecimal.
    """

    saved_ns: int
    sizes: Mapping[str, int]
    metadata_sha256: str

    @classmethod
    def of(cls, directory: str) -> Manifest:
        """Of a directory that is complete but for its manifest."""
        sizes = {name: os.path.getsize(os.path.join(directory, name)) for name in sorted(os.listdir(directory))}
        return cls(time.time_ns(), sizes, _sha256_of_metadata(directory))

    def write(self, directory: str) -> None:
        """Write it, and read it back."""
        files: dict[str, dict[str, int | str]] = {name: {"bytes": size} for name, size in self.sizes.items()}
        files[METADATA]["sha256"] = self.metadata_sha256
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "saved_ns": self.saved_ns, "files": files}, indent=1)
        with new_file(os.path.join(directory, MANIFEST)) as file:
            file.write(text.encode())
        if Manifest.read(directory) != self:
            raise OSError(errno.EIO, "what was read back differs from what was written")

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """That of a directory.

        Raises:
            CheckpointError: it has none, or a damaged one.
            FileNotFoundError: there is no such directory.
        """
        path = os.path.join(directory, MANIFEST)
        if not os.path.exists(directory):
            raise FileNotFoundError(f"Checkpoint not found: {directory}")
        if not os.path.isdir(directory):
            raise CheckpointError(
                directory, "is one plain file, not a sharded checkpoint", "It is consolidated already."
            )
        if not os.path.exists(path):
            raise CheckpointError(directory, "is a directory without a manifest, not a complete checkpoint", _ANOTHER)
        try:
            with open(path, "rb") as file:
                told = json.load(file)
            if told["format"] != _FORMAT or told["version"] not in (1, _VERSION):
                raise ValueError(f"format {told['format']!r}, version {told['version']!r}")
            sizes = {name: int(facts["bytes"]) for name, facts in told["files"].items()}
            if any(os.path.basename(name) != name or not name for name in sizes):
                raise ValueError("files outside of the directory")
            return cls(int(told["saved_ns"]), sizes, str(told["files"][METADATA]["sha256"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(path, f"is damaged: {type(error).__name__}: {error}", _ANOTHER) from error

    def check(self, directory: str) -> None:
        """Raise ``CheckpointError`` if a file is missing or has another size, or ``.metadata`` has changed."""
        for name, expected in self.sizes.items():
            path = os.path.join(directory, name)
            if not os.path.isfile(path):
                raise CheckpointError(path, "is missing. Each rank has to see all files of a directory", _ANOTHER)
            size = os.path.getsize(path)
            if size != expected:
                raise CheckpointError(path, f"has {size} bytes, it was saved with {expected}", _ANOTHER)
        if _sha256_of_metadata(directory) != self.metadata_sha256:
            path = os.path.join(directory, METADATA)
            raise CheckpointError(path, "its contents changed since it was saved (wrong SHA-256)", _ANOTHER)


def _sha256_of_metadata(directory: str) -> str:
    with open(os.path.join(directory, METADATA), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
