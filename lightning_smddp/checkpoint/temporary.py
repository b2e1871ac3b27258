"""Temporary files and directories beside what they will replace, and those that killed writers have left."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress

_TEMPORARY = re.compile(r"\.tmp-.*-[0-9a-f]{16}", re.DOTALL)
_NAME_LENGTH = 50  # of the checkpoint's name in that of a temporary file, which may have 255 bytes
STRAY_AFTER_S = 24 * 3600.0  # where nobody can tell whether its writer lives
_ATTEMPTS = 100  # to make one that nobody takes for a stray one


def temporary_name(name: str) -> str:
    """A name that nobody else has, for a file or directory that will be renamed to ``name``."""
    return f".tmp-{name[:_NAME_LENGTH]}-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Whether ``name`` is of :func:`temporary_name`."""
    return _TEMPORARY.fullmatch(name) is not None


def create(parent: str, name: str, make: Callable[[str], int]) -> tuple[int, str]:
    """A new one in ``parent``, locked for as long as its descriptor is open: by that its writer is known to live.

    Args:
        parent: a directory.
        name: see :func:`temporary_name`.
        make: makes the file or directory at a path, and opens it.

    Returns:
        Its descriptor and its path.
    """
    for _ in range(_ATTEMPTS):
        path = os.path.join(parent, temporary_name(name))
        descriptor = make(path)
        # Between its creation and its lock somebody may take it for a stray one: then he has its lock, or it has no
        # name any more.
        is_taken = lock(descriptor) is False
        if not is_taken and os.fstat(descriptor).st_nlink > 0:
            return descriptor, path
        os.close(descriptor)
    raise OSError(errno.EBUSY, "temporary files are removed as soon as they are made", parent)


def lock(descriptor: int) -> bool | None:
    """Lock a file or directory; False if somebody has it locked, None if its file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove(path: str) -> None:
    """Remove a file, a directory, or a link, not what it points to."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def remove_strays(parent: str) -> list[str]:
    """Remove temporary files and directories of ours whose writers are gone; returns their names.

    Follows no symbolic link.
    """
    strays = []
    with os.scandir(parent) as entries:
        for entry in entries:
            if not is_temporary(entry.name):
                continue
            if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
                strays.append(entry.name)
    removed = []
    for name in strays:
        with suppress(OSError):  # gone meanwhile, or not ours: no reason not to save
            if _remove_stray(os.path.join(parent, name)):
                removed.append(name)
    return removed


def _remove_stray(path: str) -> bool:
    """Whether it was removed: not if its writer lives."""
    kind = os.O_RDWR  # which NFS needs for a lock
    if os.path.isdir(path):
        kind = os.O_RDONLY | os.O_DIRECTORY
    # Neither through a link, which would be somebody else's file, nor waiting for the writer of a pipe.
    descriptor = os.open(path, kind | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Whose writer lives is locked. Where there are no locks, age has to do.
        is_stray = lock(descriptor)
        if is_stray is None:
            age_s = time.time() - os.fstat(descriptor).st_mtime
            is_stray = age_s > STRAY_AFTER_S
        if is_stray:
            remove(path)
        return is_stray
    finally:
        os.close(descriptor)
