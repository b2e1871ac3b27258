"""Reading: damage is found and named in one line, and nothing that a file contains is run."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.reading import read_checkpoint, verify_checkpoint
from lightning_smddp.checkpoint.zip_files import TAIL_BYTES, saved_ns
from tests.checkpoint.models import assert_equal, example, save


def refused(path: Path | str) -> CheckpointError:
    """The error of reading ``path``: one line with path, reason and fix that never advises to run code."""
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    error = caught.value
    assert str(error) == f"{path}: {error.reason}. {error.fix}"
    assert "\n" not in str(error)
    assert "weights_only" not in str(error)
    return error


def write(path: Path, kind: str) -> bytes:
    """A checkpoint of ours or of plain torch; returns its bytes."""
    if kind == "ours":
        save(path)
    else:
        torch.save(example(), path)
    return path.read_bytes()


# ---- damage ----


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_flipped_bits(kind: str, tmp_path: Path) -> None:
    """They are found, or without any effect, as in the padding between tensors."""
    path = tmp_path / "a.ckpt"
    data, pick = write(path, kind), random.Random(0)
    size, found = len(data), 0
    for offset in [*range(40), *pick.sample(range(size), 150), *range(size - 170, size)]:
        damaged = bytearray(data)
        damaged[offset] ^= 1 << pick.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = read_checkpoint(path)
        except CheckpointError:
            found += 1
        else:
            assert_equal(loaded, example())
    assert found > 150


def test_a_flipped_bit_in_a_weight(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    data, weight = write(path, "ours"), example()["state_dict"]["weight"].numpy().tobytes()
    damaged = bytearray(data)
    damaged[data.index(weight) + 1000] ^= 1
    path.write_bytes(damaged)
    assert not torch.equal(torch.load(path)["state_dict"]["weight"], example()["state_dict"]["weight"])
    assert "a checksum or its end is wrong" in refused(path).reason


@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_cut_off_or_continued(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    data = write(path, kind)
    for length in [*range(0, len(data), 97), *range(len(data) - 150, len(data))]:
        path.write_bytes(data[:length])
        refused(path)
    for length in (1, 22, 120, 3000):
        path.write_bytes(data + b"x" * length)
        refused(path)


def test_a_checksum_that_torch_was_told_not_to_write(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(example(), tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert_equal(read_checkpoint(tmp_path / "a.ckpt"), example())


def test_files_of_earlier_versions_which_end_with_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(example(), path)
    comment = b"lightning-smddp 1 saved=%020d sha256=" % 5 + 64 * b"a"
    path.write_bytes(path.read_bytes()[:-2] + struct.pack("<H", len(comment)) + comment)
    assert_equal(read_checkpoint(path), example())
    assert saved_ns(path.read_bytes()[-TAIL_BYTES:]) == 5


def test_the_format_before_zip_files(tmp_path: Path) -> None:
    torch.save(example(), tmp_path / "a.ckpt", _use_new_zipfile_serialization=False)
    assert_equal(read_checkpoint(tmp_path / "a.ckpt"), example())


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"epoch 3\nloss 0.5\n", "is text"),
        ("Über den Wolken\n".encode(), "is text"),
        (bytes(range(256)) * 4, "is not a checkpoint"),
        (pickle.dumps({"state_dict": {}}), "bare pickle"),
        (torch.zeros(1000).numpy().tobytes(), "is not a checkpoint"),
    ],
    ids=["empty", "lfs", "html", "text", "utf-8", "binary", "pickle", "zeros"],
)
def test_other_files(contents: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(contents)
    assert reason in refused(tmp_path / "a.ckpt").reason


def test_other_zip_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("readme.txt", "text")
    assert "cannot be read" in refused(tmp_path / "a.ckpt").reason


def test_directories_and_nothing(tmp_path: Path) -> None:
    assert "is a directory" in refused(tmp_path).reason
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found: .*gone.ckpt"):
        verify_checkpoint(tmp_path / "gone.ckpt")


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("a.ckpt", "is\n empty", "Use another one.")))
    assert str(error) == "a.ckpt: is empty. Use another one."
    assert isinstance(error, ValueError)


# ---- code ----


class Malicious:
    def __init__(self, marker: Path, how: str) -> None:
        self.marker, self.how = marker, how

    def __reduce__(self) -> Any:
        command = f"touch {self.marker}"
        if self.how == "os.system":
            return os.system, (command,)
        if self.how == "Popen":
            return subprocess.Popen, (command.split(),)
        return eval, (f"__import__('os').system({command!r})",)


def write_malicious(path: Path, marker: Path, how: str, kind: str) -> None:
    contents = {**example(), "callbacks": Malicious(marker, how)}
    if kind == "ours":
        from lightning_smddp.checkpoint.contents import dump_of
        from lightning_smddp.checkpoint.locations import write_checkpoint

        write_checkpoint(dump_of(contents), path, 0)
    elif kind == "bare":
        path.write_bytes(pickle.dumps(contents))
    else:
        torch.save(contents, path, _use_new_zipfile_serialization=kind == "plain")


@pytest.mark.parametrize("kind", ["ours", "plain", "legacy", "bare"])
@pytest.mark.parametrize("how", ["os.system", "Popen", "eval"])
def test_malicious_files_are_refused(how: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, marker = tmp_path / "a.ckpt", tmp_path / "marker"
    write_malicious(path, marker, how, kind)
    for variable in ("0", "1"):
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", variable)
        error = refused(path)
        assert not marker.exists()
        assert "nothing of it was run" in error.reason or "was not read" in error.reason
        assert "add_safe_globals" not in error.fix


def test_only_the_users_word_runs_code(tmp_path: Path) -> None:
    """Which also shows that the test above could fail."""
    write_malicious(tmp_path / "a.ckpt", tmp_path / "marker", "os.system", "plain")
    with pytest.warns(UserWarning, match="weights_only=False: code that it contains runs"):
        read_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert (tmp_path / "marker").exists()


def test_classes_of_the_users_own(tmp_path: Path) -> None:
    contents = {**example(), "hyper_parameters": argparse.Namespace(width=3)}
    torch.save(contents, tmp_path / "a.ckpt")
    error = refused(tmp_path / "a.ckpt")
    assert "`argparse.Namespace`, which is not plain data" in error.reason
    assert "add_safe_globals([argparse.Namespace])" in error.fix
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert read_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"].width == 3
