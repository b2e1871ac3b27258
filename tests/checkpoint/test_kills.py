"""Processes killed while they save: a whole checkpoint is there, whenever it happens."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_program


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """Where nobody waits for a disk."""
    path = Path(tempfile.mkdtemp(prefix=f"tests-{os.getpid()}-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def run(kind: str, every: int, directory: Path, where: Path) -> dict[str, Any]:
    (where / "tmp").mkdir()
    command = ["-m", "tests.checkpoint.killed", kind, str(every), str(directory)]
    result = run_program(command, where, {"TMPDIR": str(where / "tmp")})
    assert result.returncode == 0, result.stderr
    assert os.listdir(where / "tmp") == [], "nothing of ours goes to TMPDIR"
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "every"),
    [("file", 4), ("directory", 12), pytest.param("directory", 1, marks=pytest.mark.exhaustive)],
)
def test_before_and_after_every_call(kind: str, every: int, memory_directory: Path, tmp_path: Path) -> None:
    found = run(kind, every, memory_directory, tmp_path)
    assert found["lost"] == 0
    assert found["kills"] > 20
    assert found["old"] > 5
    assert found["new"] > 1  # one of them is the save that nobody killed
