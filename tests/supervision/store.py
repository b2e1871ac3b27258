"""A stand-in for torch's store that costs no import of torch."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path


class FileStore:
    """The part of ``torch.distributed.Store`` that supervisors use, on files; a key has one writer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "_")

    def set(self, key: str, value: str) -> None:
        temporary = self._path(f"{key}.{os.getpid()}")
        temporary.write_text(value)
        temporary.rename(self._path(key))

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def add(self, key: str, amount: int) -> int:
        number = amount + (int(self.get(key)) if self.check([key]) else 0)
        self.set(key, str(number))
        return number

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {keys} in the store")
            time.sleep(0.005)
