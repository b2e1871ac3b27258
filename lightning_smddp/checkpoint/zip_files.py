"""A checkpoint file as what ``torch.save`` writes, a zip file: when it was saved, and whether it is whole.

A zip file has a CRC-32 of each record, a table of them, and an end that says where the table is: a flipped bit in a
record and a missing piece are found by these. A zip file may also end with a comment. Ours is the time of saving, so
that it becomes visible by the same rename as the contents, and ``torch.load`` and Lightning read the file as ever::

    <everything else> <length of the comment, 2 bytes> lightning-smddp saved=<ns>

Format: PKWARE's APPNOTE.TXT, 4.3.16, "End of central directory record".
"""

from __future__ import annotations

import errno
import os
import re
import struct
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

TAIL_BYTES = 150  # of the file: the comment is in them
_END_RECORD = b"PK\x05\x06"
_END_RECORD_BYTES = 22
_LONGEST_COMMENT = 2**16
# Files of earlier versions have a version number before, and a hash behind.
_SAVED = re.compile(rb"lightning-smddp (?:1 )?saved=(\d{20})(?: sha256=[0-9a-f]{64})?\Z")
_PIECE_BYTES = 2**20


class BrokenZipError(ValueError):
    """The file is cut off, continued or changed."""


def saved_ns(tail: bytes) -> int | None:
    """When a file that ends with ``tail`` was saved, in nanoseconds since 1970; None if it does not say so."""
    match = _SAVED.search(tail)
    if match is None:
        return None
    return int(match[1])


def require_whole(file: IO[bytes]) -> None:
    """Read a zip file and compare its checksums, which ``torch.load`` does not.

    ``torch.save`` can be told to write none, which are zeros then: such records are not looked at.

    Raises:
        BrokenZipError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        # Parsers look for the end from behind, and pass over what follows it; so that comes first. Then each record is
        # read, at the end of which `zipfile` compares its CRC-32.
        _require_end(file)
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                with archive.open(record) as contents:
                    while record.CRC and contents.read(_PIECE_BYTES):
                        pass
    except Exception as error:  # whatever its parser stumbles over
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is a wrong offset
            raise
        raise BrokenZipError(str(error)) from error


def _require_end(file: IO[bytes]) -> None:
    """Raise if something follows a zip file's end, or is missing there, which its parsers tolerate."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LONGEST_COMMENT - _END_RECORD_BYTES))
    tail = file.read()
    start = tail.rfind(_END_RECORD)
    end = start + _END_RECORD_BYTES
    # The last two bytes of the end's record are the length of the comment behind it.
    comment_bytes = int.from_bytes(tail[end - 2 : end], "little")
    if start < 0 or end + comment_bytes != len(tail):
        raise BrokenZipError("its end is not where it says")


class Writer:
    """What ``torch.save`` writes to: passes everything on to ``file``, and remembers its error.

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
            for start in range(0, len(view), _PIECE_BYTES):
                self._file.write(view[start : start + _PIECE_BYTES])
        except Exception as error:
            self._error = error
            raise
        self.size += len(view)
        return len(view)

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


class _StampingWriter(Writer):
    """Passes on a zip file without a comment, and ends it with ours."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._held = b""  # the last 2 bytes so far: at the end they are the length of the comment

    def write(self, data: Any) -> int:
        # Held back: the last 2 bytes. A zip file ends with the length of its comment, and ours is to be another one; a
        # file in S3 cannot be changed afterwards.
        view = memoryview(data).cast("B")
        if len(view) < 2:
            joined = self._held + bytes(view)
            super().write(joined[:-2])
            self._held = joined[-2:]
        else:
            super().write(self._held)
            super().write(view[:-2])
            self._held = bytes(view[-2:])
        return len(view)

    def stamp(self) -> None:
        assert self._held == b"\0\0", "torch.save has written something else than a zip file without a comment"
        comment = b"lightning-smddp saved=%020d" % time.time_ns()
        length = struct.pack("<H", len(comment))
        super().write(length + comment)


def write_stamped(dump: Any, file: IO[bytes]) -> int:
    """Have ``dump`` write a checkpoint to ``file``, with the time of saving; returns the number of bytes.

    Args:
        dump: called with an object that has ``write``; see ``contents.py``.
        file: open for writing; it is flushed, not closed.

    Raises:
        OSError: what ``file`` raised.
    """
    writer = _StampingWriter(file)
    with writer.own_error():
        dump(writer)
    writer.stamp()
    file.flush()
    return writer.size
