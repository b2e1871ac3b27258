"""Directories that appear complete, and replace others without a moment in which there is none.

A directory cannot be renamed over another one, but Linux can exchange two names at once (renameat2(2)). File systems
that cannot do so get two renames; between these the previous one has a name that is found, see :func:`existing`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightning_smddp.checkpoint.files import (
    STRAY_AFTER_S,
    is_temporary,
    lock_file,
    sync_directory,
    temporary_name,
)

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.EXDEV)
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def new_directory(final: str) -> Iterator[str]:
    """A new directory beside ``final``, to be filled and handed to :func:`put_in_place`; removed if that is not done.

    Those that others have left there are removed first. For as long as its writer lives, the directory is locked.
    """
    parent, name = os.path.split(os.path.abspath(final))
    os.makedirs(parent, exist_ok=True)
    remove_stray_directories(parent)
    descriptor, path = _create(parent, name)
    try:
        yield path
    finally:
        os.close(descriptor)
        if os.path.lexists(path):
            shutil.rmtree(path, ignore_errors=True)  # what went wrong first is what matters


def _create(parent: str, name: str) -> tuple[int, str]:
    for _ in range(100):
        path = os.path.join(parent, temporary_name(name))
        os.mkdir(path)
        descriptor = os.open(path, _OPEN)
        if lock_file(descriptor) is not False and os.fstat(descriptor).st_nlink > 0:
            return descriptor, path
        os.close(descriptor)  # somebody took it for a stray one, between its creation and its lock
    raise OSError(errno.EBUSY, "temporary directories are removed as soon as they are made", parent)


def put_in_place(temporary: str, final: str) -> None:
    """Give a complete directory its name; what had that name is removed afterwards."""
    parent = os.path.dirname(os.path.abspath(final))
    sync_directory(temporary)
    previous = previous_name(final)
    if not os.path.lexists(final):
        os.rename(temporary, final)
    elif exchange(temporary, final):
        sync_directory(parent)
        _remove(temporary)
    else:
        remove_directory(previous)
        os.rename(final, previous)
        os.rename(temporary, final)
    sync_directory(parent)
    remove_directory(previous)


def exchange(one: str, other: str) -> bool:
    """Exchange two names at once; False if this system or file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), other)


def previous_name(final: str) -> str:
    """Where the previous one is while names cannot be exchanged at once."""
    stem, suffix = os.path.splitext(final.rstrip(os.sep))
    return f"{stem}.previous{suffix}"


def existing(path: str) -> str:
    """``path``; or if there is none, but a writer died between two renames, where the previous one is."""
    previous = previous_name(path)
    return previous if not os.path.lexists(path) and os.path.isdir(previous) else path


def remove_directory(path: str) -> None:
    """Remove a directory, file or link (not what it points to), complete until it is gone; nothing if there is none."""
    parent, name = os.path.split(os.path.abspath(path))
    doomed = os.path.join(parent, temporary_name(name))
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return
    _remove(doomed)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def remove_stray_directories(parent: str) -> None:
    """Remove temporary directories of ours whose writers are gone. Follows no symbolic link."""
    with os.scandir(parent) as entries:
        strays = [e.path for e in entries if is_temporary(e.name) and e.is_dir(follow_symlinks=False)]
    for path in strays:
        with suppress(OSError):  # gone meanwhile, or not ours: no reason not to save
            _remove_stray(path)


def _remove_stray(path: str) -> None:
    descriptor = os.open(path, _OPEN)
    try:
        locked = lock_file(descriptor)
        old = time.time() - os.fstat(descriptor).st_mtime > STRAY_AFTER_S
        if locked or (locked is None and old):
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
