"""Writing a checkpoint such that at any moment a valid one exists, whenever the process or the machine dies.

Main flow: :func:`write_file`. Everything goes to a temporary file in the directory of the checkpoint (elsewhere could
be another file system, where a rename becomes truncate-and-copy). Only when it is complete, on disk and read back
does one ``rename`` put it in the place of the previous one; checksums are inside the file (see ``zip_files.py``). See
rename(2): "newpath ... will be atomically replaced".
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from lightning_smddp.checkpoint.contents import Dump
from lightning_smddp.checkpoint.temporary import create, remove, remove_strays, temporary_name
from lightning_smddp.checkpoint.zip_files import BrokenZipError, Writer, require_whole, write_stamped

# renameat2(2) has no function in `os`: constants of Linux's fcntl.h and fs.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.EXDEV)
# Of errors that fsspec raises without a number.
_NUMBERS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, TimeoutError: errno.ETIMEDOUT}


def write_file(dump: Dump, path: str, needed: int, verify: bool = True) -> None:
    """Write a checkpoint to the local ``path``; what was there stays until the new one is complete and verified.

    Temporary files in that directory whose writers are gone are removed first. The file's mode is what the umask
    leaves of 0666; a symbolic link at ``path`` is replaced, not followed.

    Args:
        dump: writes the contents; see ``contents.py``.
        path: the directory is made if it is not there.
        needed: bytes that it takes, about.
        verify: read the file back from the disk and compare its checksums, before it replaces another.

    Raises:
        OSError: of the kind that the system reported (no space, read-only, directory gone ...), with ``path`` as
            ``filename`` and the bytes needed. The previous file, if there was one, is intact.
    """
    directory, name = os.path.split(os.path.abspath(path))
    try:
        os.makedirs(directory, exist_ok=True)
        remove_strays(directory)
        require_space(directory, needed)
        _write(dump, directory, name, verify)
    except OSError as error:
        raise explained(error, path, needed) from error


def explained(error: OSError, path: str, needed: int) -> OSError:
    """``error`` with the checkpoint's path and size in its message."""
    number = error.errno
    if not number:
        number = _NUMBERS.get(type(error), errno.EIO)
    text = error.strerror or str(error)
    return OSError(number, f"{text}: could not save a checkpoint, which needs {needed} bytes", path)


def _write(dump: Dump, directory: str, name: str, verify: bool) -> None:
    descriptor, temporary = create(directory, name, _make_file)
    try:
        with open(descriptor, "wb", buffering=2**20) as file:  # closing it also ends the lock
            write_stamped(dump, file)
            # First the contents, then the name: a rename that reaches the disk before the data would name a file of
            # zeros after a power failure.
            os.fsync(descriptor)
            if verify:
                _drop_from_cache(descriptor)
                with open(temporary, "rb") as written:
                    require_as_written(written)
            put_in_place(temporary, os.path.join(directory, name))
    except BaseException:
        with suppress(OSError):  # what went wrong first is what matters
            os.unlink(temporary)
        raise


@contextmanager
def new_file(path: str) -> Iterator[Writer]:
    """A file to be written, which is on the disk when the context is left, and read from there afterwards."""
    with open(path, "xb", buffering=2**20) as file:
        writer = Writer(file)
        with writer.own_error():
            yield writer
        file.flush()
        os.fsync(file.fileno())
        _drop_from_cache(file.fileno())


def _drop_from_cache(descriptor: int) -> None:
    """Let the disk be read next time: a file's pages in memory say nothing of what has arrived there."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def require_as_written(file: IO[bytes]) -> None:
    """Raise ``OSError`` if a file that was just written is damaged."""
    try:
        require_whole(file)
    except BrokenZipError as error:
        raise OSError(errno.EIO, f"what was read back differs from what was written: {error}") from error


def _make_file(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def put_in_place(temporary: str, final: str) -> None:
    """Give a complete file or directory its name; what had that name is removed afterwards.

    A file replaces a file at once. Where one of the two is a directory, Linux can exchange their names at once
    (renameat2(2)); file systems that cannot do so get two renames. Between these a previous directory has a name that
    is found, see :func:`existing`.
    """
    parent = os.path.dirname(os.path.abspath(final))
    previous = previous_name(final)
    has_directory = _is_directory(temporary) or _is_directory(final)
    # At each line below, whenever the process dies there, a complete one is at `final` or at `previous`.
    if not has_directory or not os.path.lexists(final):
        os.replace(temporary, final)
    elif exchange(temporary, final):
        sync_directory(parent)
        remove(temporary)
    else:
        # What is at `previous` now is older than what is at `final`; behind the first rename it is what `existing`
        # finds.
        remove_complete(previous)
        os.rename(final, previous)
        os.rename(temporary, final)
    sync_directory(parent)
    if _is_directory(final) or _is_directory(previous):
        remove_complete(previous)


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def exchange(one: str, other: str) -> bool:
    """Exchange two names at once; False if this system or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is None:
        return False
    status = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if status == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), other)


def previous_name(final: str) -> str:
    """Where the previous one is while names cannot be exchanged at once."""
    stem, suffix = os.path.splitext(final.rstrip(os.sep))
    return f"{stem}.previous{suffix}"


def remove_complete(path: str) -> None:
    """Remove a file, directory or link (not what it points to), complete until it is gone; nothing if there is none."""
    parent, name = os.path.split(os.path.abspath(path))
    # A directory is removed file by file. First it loses its name, so that nobody takes what is left for a checkpoint.
    doomed = os.path.join(parent, temporary_name(name))
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    remove(doomed)


def require_space(directory: str, needed: int) -> None:
    """Raise ``OSError`` if fewer than ``needed`` bytes are free."""
    status = os.statvfs(directory)
    if status.f_blocks == 0:  # some network file systems report 0 of 0
        return
    free = status.f_bavail * status.f_frsize
    if free < needed:
        text = os.strerror(errno.ENOSPC)
        raise OSError(errno.ENOSPC, f"{text} ({free} bytes are free)")


def sync_directory(directory: str) -> None:
    """Make a rename last through a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(descriptor)


# ---- directories ----


@contextmanager
def new_directory(final: str) -> Iterator[str]:
    """A new directory beside ``final``, to be filled and put in place; removed if that is not done.

    What others have left there is removed first. For as long as its writer lives, the directory is locked.
    """
    parent, name = os.path.split(os.path.abspath(final))
    os.makedirs(parent, exist_ok=True)
    remove_strays(parent)
    descriptor, path = create(parent, name, _make_directory)
    try:
        yield path
    finally:
        os.close(descriptor)
        if os.path.lexists(path):
            shutil.rmtree(path, ignore_errors=True)  # what went wrong first is what matters


def _make_directory(path: str) -> int:
    os.mkdir(path)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def existing(path: str) -> str:
    """``path``; or if there is none, but a writer died between two renames, where the previous one is."""
    previous = previous_name(path)
    if not os.path.lexists(path) and os.path.isdir(previous):
        return previous
    return path


def remove_directory(path: str) -> None:
    """Remove a directory, or the previous one of :func:`existing`; of a link the link. Nothing if there is none."""
    remove_complete(existing(path))
