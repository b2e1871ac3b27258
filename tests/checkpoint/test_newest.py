"""The newest valid checkpoint of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_smddp.checkpoint import sharded
from lightning_smddp.checkpoint.newest import newest_checkpoint
from tests.checkpoint.models import example, flip, save
from tests.ranks import run_in_threads


def aged(path: Path, hours: int) -> None:
    os.utime(path, (2e9 - hours * 3600, 2e9 - hours * 3600))


def test_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "theirs.ckpt").mkdir()
    assert newest_checkpoint([]) is None
    assert newest_checkpoint([tmp_path, tmp_path / "gone", "memory://gone"]) is None


def test_the_one_changed_last_of_files_and_directories(tmp_path: Path) -> None:
    sharded.save(example(), tmp_path / "run" / "b.ckpt")
    for hours, name in enumerate(["b.ckpt", "c.ckpt", "a.ckpt"]):
        if name != "b.ckpt":
            save(tmp_path / "run" / name)
        aged(tmp_path / "run" / name, hours)
    (tmp_path / "run" / "last.ckpt").symlink_to("gone.ckpt")
    places: list[Any] = [str(tmp_path / "run"), tmp_path / "run" / "a.ckpt"]
    assert newest_checkpoint(places) == str(tmp_path / "run" / "b.ckpt")
    assert newest_checkpoint(places[1:]) == str(tmp_path / "run" / "a.ckpt")


def look(group: dist.ProcessGroup, directory: Path) -> Any:
    """The same on all ranks; one of them says why."""
    lines: list[str] = []
    return newest_checkpoint([directory], lines.append, group), lines


@pytest.mark.parametrize("damage", ["cut", "bit", "directory"])
def test_falls_back_and_says_so(damage: str, tmp_path: Path) -> None:
    save(tmp_path / "first.ckpt", 1)
    aged(tmp_path / "first.ckpt", 10**5)
    last = tmp_path / "last.ckpt"
    if damage == "directory":
        sharded.save(example(), last)
        (last / "__0_0.distcp").write_bytes(b"")
    else:
        save(last, 2)
        data = last.read_bytes()
        flip(last)
        if damage == "cut":
            last.write_bytes(data[:-30])
    (tmp_path / ".tmp-next.ckpt").write_bytes(b"half")
    (found, [line]), (other, silence) = run_in_threads(look, 2, tmp_path)
    assert found == other == str(tmp_path / "first.ckpt")
    assert line.startswith(f"Skipped a newer checkpoint that cannot be used: {last}")
    assert "\n" not in line
    assert silence == []
