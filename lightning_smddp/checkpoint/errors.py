"""The error of a checkpoint that cannot be used."""

from __future__ import annotations

import os

ANOTHER = "Use an earlier checkpoint, or another copy of this one."
"""What to do about one that is damaged."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used.

    Attributes:
        path: The file, directory or URL.
        reason: What is wrong with it.
        fix: What to do about it.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, fix: str) -> None:
        self.path, self.reason, self.fix = str(path), " ".join(reason.split()), fix
        super().__init__(self.path, self.reason, self.fix)  # the arguments, for pickling

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}. {self.fix}"
