"""Processes killed while they save: a valid checkpoint is there, whenever it happens."""

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
    """On another file system than ``tmp_path``."""
    path = Path(tempfile.mkdtemp(prefix=f"tests-{os.getpid()}-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def run(*arguments: Any, temporary: Path, where: Path) -> dict[str, Any]:
    command = ["-m", "tests.checkpoint.killed", *map(str, arguments)]
    result = run_program(command, where, {"TMPDIR": str(temporary)})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_in", "kills"),
    [
        ("disk", 10),
        pytest.param("disk", 100, marks=pytest.mark.exhaustive),
        pytest.param("memory", 100, marks=pytest.mark.exhaustive),
    ],
)
def test_at_random_times(saved_in: str, kills: int, tmp_path: Path, memory_directory: Path) -> None:
    """With TMPDIR on the other file system."""
    on_disk = tmp_path / "on disk"
    on_disk.mkdir()
    directory, temporary = (on_disk, memory_directory) if saved_in == "disk" else (memory_directory, on_disk)
    found = run("random", directory, kills, kills, temporary=temporary, where=tmp_path)
    assert found["lost"] == 0
    assert found["stray"] > 0, "no kill met a save"
    assert os.listdir(directory) == ["last.ckpt"]
    assert os.listdir(temporary) == [], "nothing of ours goes to TMPDIR"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "every"), [("files", 8), pytest.param("everywhere", 1, marks=pytest.mark.exhaustive)]
)
def test_before_and_after_every_call(where: str, every: int, tmp_path: Path, memory_directory: Path) -> None:
    found = run("boundaries", memory_directory, where, every, temporary=tmp_path, where=tmp_path)
    assert found["lost"] == 0
    assert found["kills"] > 100
    assert found["old"] > 0
    assert found["new"] > 1  # one of them is the save that nobody killed

    control = found["control"]
    assert control["lost"] > control["kills"] / 2, "writing in place loses checkpoints, else this test could not fail"
