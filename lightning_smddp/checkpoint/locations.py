"""Where a checkpoint is: a local path, or a URL that fsspec knows (``s3://bucket/run/last.ckpt``)."""

from __future__ import annotations

import errno
import os
import posixpath
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_smddp.checkpoint.contents import Dump
from lightning_smddp.checkpoint.files import explained, require_as_written, write_file
from lightning_smddp.checkpoint.temporary import STRAY_AFTER_S, is_temporary, remove, temporary_name
from lightning_smddp.checkpoint.zip_files import write_stamped

AnyPath = str | os.PathLike[str]
"""A local path, or a URL."""

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci"}


def locate(path: AnyPath) -> tuple[Any, str]:
    """The fsspec file system of ``path`` and its name there; None and a path for local files."""
    if isinstance(path, Path):
        return None, str(path)
    fs, name = url_to_fs(os.fspath(path))
    if isinstance(fs, LocalFileSystem):
        return None, name
    return fs, name


def write_checkpoint(dump: Dump, path: AnyPath, needed: int, verify: bool = True) -> None:
    """Write a checkpoint to a path or URL; what was there stays until the new one is complete and verified.

    See :func:`~lightning_smddp.checkpoint.files.write_file` for local paths, arguments and errors.
    """
    fs, name = locate(path)
    if fs is None:
        write_file(dump, name, needed, verify)
        return
    try:
        _write_remote(dump, fs, name, verify)
    except OSError as error:
        raise explained(error, str(path), needed) from error


def _write_remote(dump: Dump, fs: Any, path: str, verify: bool) -> None:
    """Upload under a temporary name, read that back, and rename it.

    In object stores renaming is a copy, made by the store, that appears when it is complete.
    """
    directory, name = posixpath.split(path)
    if not _OBJECT_STORES & {fs.protocol, *fs.protocol}:  # where this would make a bucket of a wrong name
        fs.makedirs(directory, exist_ok=True)
    _remove_remote_strays(fs, directory)
    temporary = posixpath.join(directory, temporary_name(name))
    try:
        with fs.open(temporary, "wb") as file:
            size = write_stamped(dump, file)
        _require_size(fs, temporary, size)
        if verify:
            with fs.open(temporary, "rb") as written:
                require_as_written(written)
        # Where a store copies instead of renaming, the copy's size is checked as well.
        fs.mv(temporary, path)
        _require_size(fs, path, size)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what matters
            fs.rm_file(temporary)
        raise


def _require_size(fs: Any, path: str, expected: int) -> None:
    fs.invalidate_cache(posixpath.dirname(path))
    size = fs.size(path)
    if size != expected:
        raise OSError(errno.EIO, f"{size} bytes arrived of {expected}")


def _remove_remote_strays(fs: Any, directory: str) -> None:
    """Remove temporary files of more than a day ago; whether a younger one's writer lives cannot be seen."""
    with suppress(OSError, NotImplementedError):  # no reason not to save
        for entry in fs.ls(directory, detail=True, refresh=True):
            path = entry["name"]
            if entry["type"] != "file" or not is_temporary(posixpath.basename(path)):
                continue
            age_s = time.time() - modified_ns(fs, path) / 1e9
            if age_s > STRAY_AFTER_S:
                fs.rm_file(path)


def modified_ns(fs: Any, path: str) -> int:
    """When a file was changed, in nanoseconds since 1970."""
    return int(fs.modified(path).timestamp() * 1e9)


def remove_checkpoint(path: AnyPath) -> None:
    """Remove a checkpoint, file or directory; of a symbolic link the link only. Nothing happens if there is none."""
    fs, name = locate(path)
    if fs is not None:
        if fs.exists(name):
            fs.rm(name, recursive=True)
    else:
        with suppress(FileNotFoundError):  # the wish is fulfilled
            remove(name)
