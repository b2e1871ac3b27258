"""Writing a checkpoint such that at any moment a valid one exists, whenever the process or the machine dies.

Main flow: :func:`write_file`. Everything goes to a temporary file in the directory of the checkpoint (elsewhere could
be another file system, where a rename becomes truncate-and-copy). Only when it is complete, on disk and read back
does one ``rename`` put it in the place of the previous one; the hash is inside the file (see ``seal.py``), so there
is no moment at which one is new and the other old. See rename(2): "newpath ... will be atomically replaced".
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from contextlib import suppress

from lightning_smddp.checkpoint.contents import Dump
from lightning_smddp.checkpoint.seal import write_sealed

_TEMPORARY = re.compile(r"\.tmp-.*-[0-9a-f]{16}", re.DOTALL)
_NAME_LENGTH = 50  # of the checkpoint's name in that of a temporary file, which may have 255 bytes
STRAY_AFTER_S = 24 * 3600.0  # where nobody can tell whether its writer lives
_ATTEMPTS = 100
# Of errors that fsspec raises without a number.
_NUMBERS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, TimeoutError: errno.ETIMEDOUT}


def temporary_name(name: str) -> str:
    """A name that nobody else has, for a file that will be renamed to ``name``."""
    return f".tmp-{name[:_NAME_LENGTH]}-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Whether ``name`` is of :func:`temporary_name`."""
    return _TEMPORARY.fullmatch(name) is not None


def write_file(dump: Dump, path: str, needed: int, verify: bool = True) -> None:
    """Write a checkpoint to the local ``path``; what was there stays until the new one is complete and verified.

    Temporary files in that directory whose writers are gone are removed first. The file's mode is what the umask
    leaves of 0666; a symbolic link at ``path`` is replaced, not followed.

    Args:
        dump: writes the contents; see ``contents.py``.
        path: the directory is made if it is not there.
        needed: bytes that it takes, about.
        verify: read the file back from the disk and compare its hash, before it replaces another.

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
    text = error.strerror or str(error)
    number = error.errno or _NUMBERS.get(type(error), errno.EIO)
    return OSError(number, f"{text}: could not save a checkpoint, which needs {needed} bytes", path)


def _write(dump: Dump, directory: str, name: str, verify: bool) -> None:
    descriptor, temporary = _create(directory, name)
    try:
        with open(descriptor, "wb", buffering=2**20) as file:  # closing it also ends the lock
            seal, _ = write_sealed(dump, file)
            os.fsync(descriptor)
            if verify:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # read the disk, not the cache
                with open(temporary, "rb", buffering=0) as written:
                    if not seal.matches(written):
                        raise OSError(errno.EIO, "what was read back differs from what was written")
            os.replace(temporary, os.path.join(directory, name))
    except BaseException:
        with suppress(OSError):  # what went wrong first is what matters
            os.unlink(temporary)
        raise
    sync_directory(directory)


def _create(directory: str, name: str) -> tuple[int, str]:
    """A new file, locked for as long as it is open: by that others know that its writer lives."""
    for _ in range(_ATTEMPTS):
        temporary = os.path.join(directory, temporary_name(name))
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if lock_file(descriptor) is not False and os.fstat(descriptor).st_nlink > 0:
            return descriptor, temporary
        os.close(descriptor)  # somebody took it for a stray file, between its creation and its lock
    raise OSError(errno.EBUSY, "temporary files are removed as soon as they are made", directory)


def lock_file(descriptor: int) -> bool | None:
    """Lock a file; False if somebody has it locked, None if its file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_strays(directory: str) -> list[str]:
    """Remove temporary files of ours whose writers are gone, and return their names. Follows no symbolic link."""
    removed = []
    with os.scandir(directory) as entries:
        strays = [e.name for e in entries if is_temporary(e.name) and e.is_file(follow_symlinks=False)]
    for name in strays:
        with suppress(OSError):  # gone meanwhile, or not ours: no reason not to save
            if _remove_stray(os.path.join(directory, name)):
                removed.append(name)
    return removed


def _remove_stray(path: str) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        locked = lock_file(descriptor)
        old = time.time() - os.fstat(descriptor).st_mtime > STRAY_AFTER_S
        if locked or (locked is None and old):
            os.unlink(path)
            return True
        return False
    finally:
        os.close(descriptor)


def require_space(directory: str, needed: int) -> None:
    """Raise ``OSError`` if fewer than ``needed`` bytes are free."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks > 0 and free < needed:  # some network file systems report 0 of 0
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({free} bytes are free)")


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
