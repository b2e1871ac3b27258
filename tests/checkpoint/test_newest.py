"""The newest valid checkpoint of a run."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
import torch

from lightning_smddp.checkpoint.locations import locate
from lightning_smddp.checkpoint.newest import newest_checkpoint
from lightning_smddp.checkpoint.temporary import temporary_name
from tests.checkpoint.models import example, save


def test_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    assert newest_checkpoint([]) is None
    assert newest_checkpoint([tmp_path, tmp_path / "gone", "memory://gone"]) is None


def test_the_one_saved_last(tmp_path: Path) -> None:
    """Which is not the one changed last: copying a run's directory gives its files other times."""
    for step, name in enumerate(["b.ckpt", "c.ckpt", "a.ckpt"]):
        save(tmp_path / "run" / name, step)
    for time, name in enumerate(["a.ckpt", "b.ckpt", "c.ckpt"]):
        os.utime(tmp_path / "run" / name, (2e9 + time, 2e9 + time))
    assert newest_checkpoint([tmp_path / "run"]) == str(tmp_path / "run" / "a.ckpt")


def test_plain_ones_go_by_their_time(tmp_path: Path) -> None:
    for time, name in ((2e9, "later.ckpt"), (1e9, "earlier.ckpt")):
        torch.save(example(), tmp_path / name)
        os.utime(tmp_path / name, (time, time))
    save(tmp_path / "ours.ckpt")
    assert newest_checkpoint([tmp_path]) == str(tmp_path / "later.ckpt")
    os.remove(tmp_path / "later.ckpt")
    assert newest_checkpoint([tmp_path]) == str(tmp_path / "ours.ckpt")


@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "text"])
def test_falls_back_and_says_so(damage: str, tmp_path: Path) -> None:
    save(tmp_path / "first.ckpt", 1)
    save(tmp_path / "last.ckpt", 2)
    data = bytearray((tmp_path / "last.ckpt").read_bytes())
    data[len(data) // 2] ^= 4
    contents = {"cut": data[:-30], "empty": b"", "bit": data, "text": b"text"}[damage]
    (tmp_path / "last.ckpt").write_bytes(contents)
    (tmp_path / temporary_name("next.ckpt")).write_bytes(b"half")
    lines: list[str] = []
    assert newest_checkpoint([tmp_path], report=lines.append) == str(tmp_path / "first.ckpt")
    (line,) = lines
    assert line.startswith(f"Skipped a newer checkpoint that cannot be used: {tmp_path / 'last.ckpt'}: ")
    assert "\n" not in line


def test_several_places_and_links(tmp_path: Path) -> None:
    save(tmp_path / "old" / "a.ckpt", 1)
    save(tmp_path / "new" / "b.ckpt", 2)
    (tmp_path / "new" / "last.ckpt").symlink_to("gone.ckpt")
    found = newest_checkpoint([tmp_path / "old", str(tmp_path / "new"), tmp_path / "old" / "a.ckpt"])
    assert found == str(tmp_path / "new" / "b.ckpt")
    assert newest_checkpoint([tmp_path / "old" / "a.ckpt"]) == str(tmp_path / "old" / "a.ckpt")


def test_urls() -> None:
    fs = fsspec.filesystem("memory")
    try:
        for step, name in enumerate(["b", "a"]):
            save(f"memory://run/{name}.ckpt", step)
        _, path = locate("memory://run/a.ckpt")
        assert newest_checkpoint(["memory://run"]) == "memory:///run/a.ckpt"
        fs.pipe(path, fs.cat(path)[:-1])
        lines: list[str] = []
        assert newest_checkpoint(["memory://run"], report=lines.append) == "memory:///run/b.ckpt"
        assert len(lines) == 1
    finally:
        fs.rm("/run", recursive=True)
