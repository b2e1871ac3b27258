"""Reading a checkpoint: verified first, and never as code."""

from __future__ import annotations

import pickle
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_smddp.checkpoint.errors import ANOTHER, CheckpointError
from lightning_smddp.checkpoint.locations import AnyPath, locate
from lightning_smddp.checkpoint.zip_files import BrokenZipError, require_whole

_DAMAGED = "is cut off or damaged: the zip file's table of contents, a checksum or its end is wrong"
_ZIP = b"PK\x03\x04"
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # what torch.save wrote at first until torch 1.6
_GLOBAL = re.compile(r"GLOBAL (\S+)")
_CALLS_CODE = {"builtins", "code", "ctypes", "importlib", "multiprocessing", "nt", "os", "pickle", "posix", "pty"} | {
    "runpy", "shutil", "socket", "subprocess", "sys", "webbrowser",
}  # fmt: skip


def read_checkpoint(
    path: AnyPath, map_location: Any = "cpu", weights_only: bool | None = None, mmap: bool = False
) -> Any:
    """Verify a checkpoint at a path or URL, and load it.

    Args:
        path: a file of ours, or any other that ``torch.save`` wrote.
        map_location: where tensors go; see ``torch.load``.
        weights_only: None and True load tensors and plain data only. False, which warns, runs the code that the
            file contains; nothing but the caller's False does so, no environment variable either.
        mmap: of a local file, leave tensors there until they are used.

    Raises:
        CheckpointError: the file is damaged, no checkpoint, or has objects that are not plain data.
        FileNotFoundError: there is no such file.
    """
    with _opened(path) as file:
        _verify(file, str(path))
        if weights_only is False:
            warnings.warn(
                f"{path} is loaded with weights_only=False: code that it contains runs. Do so with files of your own "
                "only.",
                stacklevel=2,
            )
        file.seek(0)
        return _load(file, str(path), map_location, weights_only is not False, mmap)


def refused_objects(path: AnyPath) -> list[str]:
    """Classes and functions in a local file that :func:`read_checkpoint` will refuse; of a remote one none is known."""
    fs, name = locate(path)
    if fs is not None:
        return []
    return sorted(get_unsafe_globals_in_checkpoint(name))


def verify_checkpoint(path: AnyPath) -> None:
    """Read a whole file and compare the checksums that ``torch.save`` wrote.

    Raises:
        CheckpointError, FileNotFoundError: as :func:`read_checkpoint`.
    """
    with _opened(path) as file:
        _verify(file, str(path))


@contextmanager
def _opened(path: AnyPath) -> Iterator[IO[bytes]]:
    """The file; of a remote one a local copy."""
    fs, name = locate(path)
    # What is verified is what is loaded: a remote file could be another one when it is read a second time.
    try:
        if fs is None:
            with open(name, "rb") as file:
                yield file
        else:
            with fs.open(name, "rb") as remote, tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(remote, copy, 2**24)
                yield copy
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Checkpoint file not found: {path}") from error
    except IsADirectoryError as error:
        raise CheckpointError(path, "is a directory, not a checkpoint file", "Give the file itself.") from error


def _verify(file: IO[bytes], path: str) -> None:
    file.seek(0)
    start = file.read(512)
    if start.startswith(_ZIP):
        try:
            require_whole(file)
        except BrokenZipError as error:
            raise CheckpointError(path, _DAMAGED, ANOTHER) from error
    elif not start.startswith(_LEGACY):  # which has no checksums
        raise CheckpointError(path, *_what_it_is(start))


def _what_it_is(start: bytes) -> tuple[str, str]:
    """What a file is that begins with ``start`` and is no checkpoint, and what to do."""
    text = start.lstrip().lower()
    if not start:
        return "is empty", ANOTHER
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself", "Fetch the contents with `git lfs pull`."
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page or XML text, not a checkpoint", "Download it again: it may be an error or a login page."
    if start.startswith(b"\x80"):
        return "is a bare pickle, which can run any code when it is read; it was not read", ANOTHER
    printable = [byte for byte in start if byte >= 32 or byte in b"\t\r\n"]
    if b"\0" not in start and len(printable) > 0.95 * len(start):
        return "is text, not a checkpoint", "Check the path."
    return "is not a checkpoint, or its beginning is damaged", ANOTHER


def _load(file: IO[bytes], path: str, map_location: Any, weights_only: bool, mmap: bool) -> Any:
    source = path if mmap else file  # torch maps by a path only
    try:
        return torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mmap)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(path, *_refused(str(error))) from error
    except Exception as error:  # a damaged file without a hash of ours, or what unpickling the user's classes raised
        first_line, _, _ = str(error).partition("\n")
        reason = f"cannot be read: {type(error).__name__}: {first_line}"
        raise CheckpointError(path, reason, ANOTHER) from error


def _refused(message: str) -> tuple[str, str]:
    """Reason and cure for an object that is not plain data; torch's own message advises to load it regardless."""
    found = _GLOBAL.search(message)
    if found is None:
        return "contains something else than tensors and plain data; nothing of it was run", ANOTHER
    name = found[1].rstrip(".,")
    module, _, attribute = name.rpartition(".")
    reason = f"contains `{name}`, which is not plain data; nothing of it was run"
    # Only a class that is imported already is advised to be allowed, and none of a module that runs code or commands.
    found_object = getattr(sys.modules.get(module), attribute, None)
    package, _, _ = module.partition(".")
    if not isinstance(found_object, type) or package in _CALLS_CODE:
        return reason, "Use a checkpoint from a source that you trust."
    return reason, (
        f"If the file is your own, call `torch.serialization.add_safe_globals([{name}])` before, or save without it, "
        "as by `save_hyperparameters(ignore=[...])`."
    )
