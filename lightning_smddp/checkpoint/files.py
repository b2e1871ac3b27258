"""Plain checkpoint files, local or at a URL: at any moment a whole one is there, and none is read unverified.

A file is written beside its place, as ``.tmp-<name>`` (elsewhere could be another file system, where a rename becomes
truncate-and-copy), brought to the disk, and renamed: rename(2) replaces what was there at once. A killed writer's
``.tmp-<name>`` is overwritten by the next one of that name.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

AnyPath = str | os.PathLike[str]
"""A local path, or a URL that fsspec knows (``s3://bucket/run/last.ckpt``)."""

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci"}
ANOTHER = "Use an earlier checkpoint, or another copy of this one."
"""What to do about one that is damaged."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used. Its arguments: where it is, what is wrong with it, and what to do about it."""

    def __str__(self) -> str:
        path, reason, fix = self.args
        return f"{path}: {' '.join(reason.split())}. {fix}"


def locate(path: AnyPath) -> tuple[Any, str]:
    """The fsspec file system of ``path`` and its name there; None and a path for local files."""
    if isinstance(path, Path):
        return None, os.path.abspath(path)
    fs, name = url_to_fs(os.fspath(path))
    return (None if isinstance(fs, LocalFileSystem) else fs), name


# ---- writing ----


def save(checkpoint: Any, path: AnyPath) -> None:
    """``torch.save`` to a path or URL. See :func:`write`."""
    write(partial(torch.save, checkpoint), path)


def write(dump: Callable[[Any], object], path: AnyPath) -> None:
    """Write a file; what was there stays until the new one is complete.

    Args:
        dump: writes the contents to what it is given, which has ``write``.
        path: its directory is made if it is not there. A link is replaced, not followed.

    Raises:
        OSError: of the kind that the system reported (no space, read-only ...), with ``path`` as its ``filename``.
    """
    fs, name = locate(path)
    write_new = _write_local if fs is None else partial(_write_remote, fs)
    try:
        write_new(dump, temporary_of(name), name)
    except BaseException as error:
        with suppress(OSError):  # what went wrong first is what matters
            remove(temporary_of(os.fspath(path)))
        # torch replaces an error of the file by a RuntimeError, that does not say what it was.
        cause = error.__context__ if type(error) is RuntimeError else error
        if isinstance(cause, OSError):
            raise not_saved(cause, path) from cause
        raise


def _write_local(dump: Callable[[Any], object], new: str, path: str) -> None:
    os.makedirs(os.path.dirname(new), exist_ok=True)
    remove(new)
    with open(new, "wb") as file:
        dump(file)
        # First the contents, then the name: a rename that reaches the disk before the data would name a file of
        # zeros after a power failure.
        file.flush()
        os.fsync(file.fileno())
    put_in_place(new, path)


def _write_remote(fs: Any, dump: Callable[[Any], object], new: str, path: str) -> None:
    if not _OBJECT_STORES & {fs.protocol, *fs.protocol}:  # where this would make a bucket of a wrong name
        fs.makedirs(os.path.dirname(path), exist_ok=True)
    with fs.open(new, "wb") as file:
        dump(file)
    fs.mv(new, path)  # in object stores a copy, made by the store, which appears when it is complete


def not_saved(error: OSError, path: AnyPath) -> OSError:
    """``error``, which says which checkpoint was not saved."""
    text = f"{error.strerror or error}: could not save a checkpoint"
    return OSError(error.errno or errno.EIO, text, str(path))  # fsspec's have no number


def temporary_of(path: str) -> str:
    """Where what will be renamed to ``path`` is written."""
    parent, name = os.path.split(path)
    return os.path.join(parent, f".tmp-{name}")


def previous_of(path: str) -> str:
    """Where the previous checkpoint is while a directory takes its place, which takes two renames."""
    return f"{path.rstrip(os.sep)}.old"


def put_in_place(new: str, path: str) -> None:
    """Give a complete file or directory its name, and remove what had it."""
    # At each line, whenever the process dies there, a complete one is at `path` or at `old`.
    old = previous_of(path)
    if os.path.lexists(path) and (os.path.isdir(new) or os.path.isdir(path)):
        remove(old)
        os.rename(path, old)
    os.replace(new, path)
    sync_directory(os.path.dirname(new))
    remove(old)


def sync_directory(directory: str) -> None:
    """Make a rename last through a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


def remove(path: AnyPath) -> None:
    """Remove a file or directory; of a symbolic link the link only. Nothing happens if there is none."""
    fs, name = locate(path)
    if fs is not None:
        if fs.exists(name):
            fs.rm(name, recursive=True)
    elif os.path.isdir(name) and not os.path.islink(name):
        shutil.rmtree(name)
    else:
        Path(name).unlink(missing_ok=True)


# ---- reading ----


def load(path: AnyPath, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
    """Verify a file, and load it.

    Args:
        path: of any file that ``torch.save`` wrote.
        map_location: where tensors go; see ``torch.load``.
        weights_only: None and True load tensors and plain data only. False runs the code that the file contains.

    Raises:
        CheckpointError: the file is damaged, no checkpoint, or has objects that are not plain data.
        OSError: as the system reports it.
    """
    with _verified(path) as file:
        try:
            return torch.load(file, map_location, weights_only=weights_only is not False)
        except pickle.UnpicklingError as error:
            reason = f"cannot be unpickled: {error}"
            if weights_only is not False:  # torch adds advice to load it all the same
                told = str(error.__context__ or error).rstrip(".")
                reason = f"contains more than tensors and plain data, of which nothing was run: {told}"
            raise CheckpointError(path, reason, "Use a checkpoint from a source that you trust.") from error
        except RuntimeError as error:
            raise CheckpointError(path, f"cannot be read: {str(error).splitlines()[0]}", ANOTHER) from error


def verify(path: AnyPath) -> None:
    """Read a whole file and compare the checksums (CRC-32) that ``torch.save`` wrote, which ``torch.load`` does not.

    Raises:
        CheckpointError: it is damaged, or not a file of ``torch.save``.
        OSError: as the system reports it.
    """
    with _verified(path):
        pass


def copy(path: AnyPath, target: AnyPath) -> None:
    """Copy a file that is whole. See :func:`write`."""
    with _verified(path) as file:
        write(partial(shutil.copyfileobj, file), target)


@contextmanager
def _verified(path: AnyPath) -> Iterator[IO[bytes]]:
    """The file; of a remote one a local copy, as it could be another one when it is read a second time."""
    fs, name = locate(path)
    with open(name, "rb") if fs is None else tempfile.TemporaryFile() as file:
        if fs is not None:
            with fs.open(name, "rb") as remote:
                shutil.copyfileobj(remote, file, 2**24)
        try:
            archive = zipfile.ZipFile(file)
            # torch can be told to write no checksums, which are zeros then.
            archive.filelist = [record for record in archive.filelist if record.CRC]
            damage = archive.testzip()
        except Exception as error:  # whatever its parser stumbles over
            damage = f"{type(error).__name__}: {error}"
        if damage is not None:
            raise CheckpointError(path, f"is cut off, damaged, or not a file of torch.save ({damage})", ANOTHER)
        file.seek(0)
        yield file
