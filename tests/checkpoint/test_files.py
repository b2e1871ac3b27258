"""Plain files: what they are, failures, damage that is found, code that is not run; and the newest one of a run."""

from __future__ import annotations

import argparse
import errno
import os
import pickle
import resource
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_smddp.checkpoint import files, sharded
from lightning_smddp.checkpoint.files import CheckpointError
from lightning_smddp.checkpoint.newest import newest_checkpoint
from tests.checkpoint.models import Malicious, assert_equal, example, flip, save
from tests.ranks import run_in_threads

# ---- what the file is ----


def test_plain_torch_reads_it(tmp_path: Path) -> None:
    expected = save(tmp_path / "run" / "a.ckpt")
    loaded = torch.load(tmp_path / "run" / "a.ckpt", weights_only=True)
    assert_equal(loaded, expected)
    assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["weight"].data_ptr()
    assert_equal(files.load(tmp_path / "run" / "a.ckpt"), expected)
    assert stat.S_IMODE((tmp_path / "run" / "a.ckpt").stat().st_mode) & 0o111 == 0


def test_files_of_earlier_versions_and_without_checksums(tmp_path: Path) -> None:
    """Which end with a comment; torch can be told to write no checksums."""
    path = tmp_path / "a.ckpt"
    save(path)
    comment = b"lightning-smddp 1 saved=%020d sha256=" % 5 + 64 * b"a"
    path.write_bytes(path.read_bytes()[:-2] + len(comment).to_bytes(2, "little") + comment)
    assert_equal(files.load(path), example())
    torch.serialization.set_crc32_options(False)
    try:
        save(path, 2)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_equal(files.load(path), example(2))


# ---- failures ----


def test_writing_fails_half_way(tmp_path: Path) -> None:
    """torch's own error for that would be about an ``unexpected pos``. What was there is intact, and nothing beside."""
    path, before = tmp_path / "a.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)
    save(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(OSError, match="could not save a checkpoint") as caught:
            files.save({"big": torch.zeros(10**6)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (caught.value.filename, caught.value.errno) == (str(path), errno.EFBIG)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert_equal(files.load(path), example())


# ---- damage ----


def test_a_flipped_bit_in_a_weight(tmp_path: Path) -> None:
    """Which torch loads without a word."""
    path = tmp_path / "a.ckpt"
    weight = save(path)["state_dict"]["weight"]
    flip(path, path.read_bytes().index(weight.numpy().tobytes()) + 1000)
    assert not torch.equal(torch.load(path)["state_dict"]["weight"], weight)
    for act in (files.load, files.verify):
        with pytest.raises(CheckpointError, match=r"a.ckpt: is cut off, damaged.*Use an earlier checkpoint") as caught:
            act(path)
        assert "\n" not in str(caught.value)


def test_other_files(tmp_path: Path) -> None:
    for contents in (b"", b"<!DOCTYPE html><html></html>", pickle.dumps({"state_dict": {}})):
        (tmp_path / "a.ckpt").write_bytes(contents)
        with pytest.raises(CheckpointError, match="not a file of torch.save"):
            files.load(tmp_path / "a.ckpt")
    for name, kind in ((".", IsADirectoryError), ("gone.ckpt", FileNotFoundError)):
        with pytest.raises(kind, match=name):
            files.load(tmp_path / name)


# ---- code ----


def test_malicious_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, which does not advise to run it all the same, as torch's does."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    files.save({**example(), "callbacks": Malicious(tmp_path / "marker")}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError) as caught:
        files.load(tmp_path / "a.ckpt")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/a.ckpt: contains more than tensors and plain data, of which nothing was run: ")
    assert "posix.system" in text
    assert "weights_only" not in text
    assert "\n" not in text
    assert not (tmp_path / "marker").exists()
    files.load(tmp_path / "a.ckpt", weights_only=False)  # else this test could not fail
    assert (tmp_path / "marker").exists()


def test_classes_of_the_users_own(tmp_path: Path) -> None:
    files.save({**example(), "hyper_parameters": argparse.Namespace(width=3)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError) as caught:
        files.load(tmp_path / "a.ckpt")
    assert "GLOBAL argparse.Namespace" in str(caught.value)
    assert "add_safe_globals" in str(caught.value)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert files.load(tmp_path / "a.ckpt")["hyper_parameters"].width == 3


# ---- the newest one ----


def aged(path: Path, hours: int) -> None:
    os.utime(path, (2e9 - hours * 3600, 2e9 - hours * 3600))


def test_no_checkpoint(tmp_path: Path) -> None:
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
