"""``manifest.json``: sizes and SHA-256 of a directory's files. Written last: without it there is no checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.hashing import digest_of, hashed_file

NAME = "manifest.json"
_FORMAT, _VERSION = "lightning-smddp sharded checkpoint", 1
_ANOTHER = "Use an earlier checkpoint, or another copy of this one."


@dataclass(frozen=True)
class Manifest:
    """Contents of a directory.

    Attributes:
        saved_ns: when it was saved, in nanoseconds since 1970.
        files: name -> (bytes, SHA-256 in hexadecimal).
    """

    saved_ns: int
    files: Mapping[str, tuple[int, str]]

    def write(self, directory: str) -> None:
        """Write it to a directory whose other files are complete."""
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "saved_ns": self.saved_ns, "files": files}, indent=1)
        with hashed_file(os.path.join(directory, NAME)) as file:
            file.write(text.encode())

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """That of a directory.

        Raises:
            CheckpointError: it has none, or a damaged one.
            FileNotFoundError: there is no such directory.
        """
        path = os.path.join(directory, NAME)
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
            if (told["format"], told["version"]) != (_FORMAT, _VERSION):
                raise ValueError(f"format {told['format']!r}, version {told['version']!r}")
            files = {name: (int(facts["bytes"]), str(facts["sha256"])) for name, facts in told["files"].items()}
            if any(os.path.basename(name) != name or not name for name in files):
                raise ValueError("files outside of the directory")
            return cls(int(told["saved_ns"]), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(path, f"is damaged: {type(error).__name__}: {error}", _ANOTHER) from error

    def check_sizes(self, directory: str) -> None:
        """Raise ``CheckpointError`` if a file is missing or has another size."""
        for name, (expected, _) in self.files.items():
            path = os.path.join(directory, name)
            size = os.path.getsize(path) if os.path.isfile(path) else None
            if size is None:
                raise CheckpointError(path, "is missing. Each rank has to see all files of a directory", _ANOTHER)
            if size != expected:
                raise CheckpointError(path, f"has {size} bytes, it was saved with {expected}", _ANOTHER)

    def check_hashes(self, directory: str, names: Iterable[str]) -> None:
        """Raise ``CheckpointError`` if one of these files changed; reads all of them."""
        for name in names:
            path = os.path.join(directory, name)
            with open(path, "rb", buffering=0) as file:
                if digest_of(file) != self.files[name][1]:
                    raise CheckpointError(path, "its contents changed since it was saved (wrong SHA-256)", _ANOTHER)
