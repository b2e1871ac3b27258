"""Writing and reading piece by piece, with a SHA-256."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

_PIECE = 2 * 2**20


class Writer:
    """What ``torch.save`` and ``pickle`` write to: passes everything on to ``file``, and remembers its error.

    Attributes:
        size: Bytes passed on.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.size = 0
        self._file = file
        self._error: Exception | None = None

    def write(self, data: Any) -> int:
        """Pass on ``data`` (bytes-like)."""
        if self._error is not None:
            raise self._error
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _PIECE):
                self._pass_on(view[start : start + _PIECE])
        except Exception as error:
            self._error = error
            raise
        self.size += len(view)
        return len(view)

    def _pass_on(self, piece: memoryview) -> None:
        self._file.write(piece)

    def flush(self) -> None:
        """Do nothing: the file is flushed once, when it is complete."""

    @contextmanager
    def own_error(self) -> Iterator[None]:
        """Around ``torch.save``, which replaces an error of ``file`` by one that does not say what happened."""
        try:
            yield
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise


class HashingWriter(Writer):
    """Also hashes what it passes on."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The hash of what was passed on so far, in hexadecimal."""
        return self._hash.hexdigest()

    def _pass_on(self, piece: memoryview) -> None:
        self._hash.update(piece)
        super()._pass_on(piece)


@contextmanager
def hashed_file(path: str) -> Iterator[HashingWriter]:
    """A new file, which is on the disk and read back when the context is left.

    Raises:
        OSError: as the system reports it; also when what is read back differs.
    """
    with open(path, "xb", buffering=2**20) as file:
        writer = HashingWriter(file)
        with writer.own_error():
            yield writer
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read the disk, not the cache
    with open(path, "rb", buffering=0) as written:
        if digest_of(written) != writer.digest:
            raise OSError(errno.EIO, "what was read back differs from what was written", path)


def digest_of(file: IO[bytes]) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()
