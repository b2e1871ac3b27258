"""The seal of a checkpoint: its SHA-256 and when it was saved, at the end of the file itself.

``torch.save`` writes a zip file, and a zip file may end with a comment. The seal is that comment, so file and hash
become visible together by one rename, travel together, and ``torch.load`` and Lightning read the file as ever::

    <everything else> <length of the comment, 2 bytes> lightning-smddp 1 saved=<ns> sha256=<hex>

The hash is of all bytes in front of it, the comment's own text included, so that no bit of the file is uncovered.
Format: PKWARE's APPNOTE.TXT, 4.3.16, "End of central directory record".
"""

from __future__ import annotations

import os
import re
import struct
import time
from dataclasses import dataclass
from typing import IO, Any

from lightning_smddp.checkpoint.hashing import HashingWriter, digest_of

_MARK = b"lightning-smddp 1 saved="
_COMMENT_BYTES = len(_MARK) + 20 + len(b" sha256=") + 64
_LENGTH = struct.pack("<H", _COMMENT_BYTES)
_END_RECORD = b"PK\x05\x06"
SEAL_BYTES = 22 + _COMMENT_BYTES  # with the zip's end record
_SEAL = re.compile(_END_RECORD + rb".{16}" + re.escape(_LENGTH + _MARK) + rb"(\d{20}) sha256=([0-9a-f]{64})", re.DOTALL)


class BrokenSealError(ValueError):
    """The file has a seal, but not one that we wrote."""


@dataclass(frozen=True)
class Seal:
    """What the seal says: the hash in hexadecimal, and when the file was saved (nanoseconds since 1970)."""

    digest: str
    saved_ns: int

    @classmethod
    def parse(cls, tail: bytes) -> Seal | None:
        """From the last ``SEAL_BYTES`` of a file; None if it has no seal.

        Raises:
            BrokenSealError: it has a part of one.
        """
        match = _SEAL.fullmatch(tail)
        if match is not None:
            return cls(match[2].decode(), int(match[1]))
        if _MARK[:-6] in tail or tail.startswith(_END_RECORD):
            raise BrokenSealError
        return None

    @classmethod
    def of(cls, file: IO[bytes]) -> Seal | None:
        """See :meth:`parse`."""
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - SEAL_BYTES))
        return cls.parse(file.read(SEAL_BYTES))

    def matches(self, file: IO[bytes]) -> bool:
        """Whether the hash is that of the file's contents; reads all of it."""
        return self.digest == digest_of(file, file.seek(0, os.SEEK_END) - 64)


class SealingWriter(HashingWriter):
    """Passes on a zip file, and ends it with the seal."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._held = b""  # the last 2 bytes so far: at the end they are the length of the comment

    def write(self, data: Any) -> int:
        """Pass on ``data`` (bytes-like)."""
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

    def seal(self) -> Seal:
        """Write the end, and return what it says."""
        assert self._held == b"\0\0", "torch.save has written something else than a zip file without a comment"
        saved_ns = time.time_ns()
        super().write(b"%s%s%020d sha256=" % (_LENGTH, _MARK, saved_ns))
        digest = self.digest
        super().write(digest.encode())
        self._file.flush()
        return Seal(digest, saved_ns)


def write_sealed(dump: Any, file: IO[bytes]) -> tuple[Seal, int]:
    """Have ``dump`` write a checkpoint to ``file`` and seal it; returns the seal and the number of bytes.

    Args:
        dump: called with an object that has ``write``; see ``contents.py``.
        file: open for writing; it is flushed, not closed.

    Raises:
        OSError: what ``file`` raised.
    """
    writer = SealingWriter(file)
    with writer.own_error():
        dump(writer)
    return writer.seal(), writer.size
