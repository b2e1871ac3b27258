"""Directories that appear complete, and where they are while they are replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_smddp.checkpoint.files import previous_name, remove_complete
from lightning_smddp.checkpoint.temporary import create, remove_strays


@contextmanager
def new_directory(final: str) -> Iterator[str]:
    """A new directory beside ``final``, to be filled and put in place; removed if that is not done.

    What others have left there is removed first. For as long as its writer lives, the directory is locked.
    """
    parent, name = os.path.split(os.path.abspath(final))
    os.makedirs(parent, exist_ok=True)
    remove_strays(parent)
    descriptor, path = create(parent, name, _make)
    try:
        yield path
    finally:
        os.close(descriptor)
        if os.path.lexists(path):
            shutil.rmtree(path, ignore_errors=True)  # what went wrong first is what matters


def _make(path: str) -> int:
    os.mkdir(path)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def existing(path: str) -> str:
    """``path``; or if there is none, but a writer died between two renames, where the previous one is."""
    previous = previous_name(path)
    return previous if not os.path.lexists(path) and os.path.isdir(previous) else path


def remove_directory(path: str) -> None:
    """Remove a directory, or the previous one of :func:`existing`; of a link the link. Nothing if there is none."""
    remove_complete(existing(path))
