"""Writing: what the file is, what it leaves, and what a failure says and does not touch."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smddp.checkpoint import files, temporary
from lightning_smddp.checkpoint.contents import Snapshot, bytes_needed, dump_of
from lightning_smddp.checkpoint.files import write_file
from lightning_smddp.checkpoint.locations import remove_checkpoint, write_checkpoint
from lightning_smddp.checkpoint.reading import read_checkpoint
from lightning_smddp.checkpoint.sharded import is_sharded, save_sharded
from lightning_smddp.checkpoint.temporary import remove_strays, temporary_name
from lightning_smddp.checkpoint.zip_files import TAIL_BYTES, saved_ns
from tests.checkpoint.models import assert_equal, example, save

ROOT = Path(__file__).parent.parent.parent


# ---- what the file is ----


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"weights_only": False}], ids=str)
def test_plain_torch_reads_it(options: dict[str, Any], tmp_path: Path) -> None:
    expected = save(tmp_path / "a.ckpt")
    loaded = torch.load(tmp_path / "a.ckpt", **{"weights_only": True, **options})
    assert_equal(loaded, expected)
    state = loaded["state_dict"]
    assert state["tied"].data_ptr() == state["weight"].data_ptr()
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        assert archive.testzip() is None


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    expected = save(tmp_path / "a.ckpt")
    assert_equal(read_checkpoint(tmp_path / "a.ckpt"), expected)


def test_a_snapshot_is_not_changed_afterwards(tmp_path: Path) -> None:
    checkpoint = example()
    snapshot = Snapshot(checkpoint)
    checkpoint["state_dict"]["weight"].zero_()
    checkpoint["hyper_parameters"]["width"] = 0
    write_file(snapshot.dump, str(tmp_path / "a.ckpt"), snapshot.size)
    assert_equal(read_checkpoint(tmp_path / "a.ckpt"), example())


def test_a_snapshot_is_no_file_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {**example(), "columns": torch.arange(12.0).view(3, 4)[:, 1:3], "none": torch.empty(0, 3)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", None)
        snapshot = Snapshot(checkpoint)
    checkpoint["columns"].zero_()
    write_file(snapshot.dump, str(tmp_path / "a.ckpt"), snapshot.size)
    loaded = read_checkpoint(tmp_path / "a.ckpt")
    assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["weight"].data_ptr()
    assert torch.equal(loaded["columns"], torch.tensor([[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]))
    assert loaded["columns"].untyped_storage().nbytes() == 48  # as `torch.save` has it


class Uncopied:
    """Can be made a file of, and nothing else."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("no copies")


def test_a_snapshot_of_what_cannot_be_copied(tmp_path: Path) -> None:
    checkpoint = {**example(), "object": Uncopied()}
    snapshot = Snapshot(checkpoint)
    checkpoint["state_dict"]["weight"].zero_()
    write_file(snapshot.dump, str(tmp_path / "a.ckpt"), snapshot.size)
    assert os.path.getsize(tmp_path / "a.ckpt") >= snapshot.size
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert torch.equal(loaded["state_dict"]["weight"], example()["state_dict"]["weight"])
    assert type(loaded["object"]) is Uncopied


@pytest.mark.parametrize("pieces", [1, 2, 3, 10**6])
def test_a_zip_file_may_come_in_pieces_of_any_size(pieces: int, tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "plain")
    contents = (tmp_path / "plain").read_bytes()

    def dump(file: Any) -> None:
        for start in range(0, len(contents), pieces):
            file.write(contents[start : start + pieces])

    before = time.time_ns()
    write_file(dump, str(tmp_path / "a"), 0)
    written = (tmp_path / "a").read_bytes()
    assert written[: len(contents) - 2] == contents[:-2]
    assert before <= (saved_ns(written[-TAIL_BYTES:]) or 0) <= time.time_ns()
    assert read_checkpoint(tmp_path / "a") == {"epoch": 3}


def test_the_size_is_known_before(tmp_path: Path) -> None:
    checkpoint = {**example(), "big": torch.zeros(1_000_000), "part": torch.zeros(1000, 1000)[:, :2]}
    needed = bytes_needed(checkpoint)
    write_file(dump_of(checkpoint), str(tmp_path / "a.ckpt"), needed)
    assert 0.98 * needed < os.path.getsize(tmp_path / "a.ckpt") <= needed


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_the_umask_decides_who_may_read(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "a.ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.ckpt").stat().st_mode) == mode


def test_makes_directories_and_replaces_links(tmp_path: Path) -> None:
    save(tmp_path / "new" / "a.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("new/a.ckpt")
    save(tmp_path / "last.ckpt", 2)
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert [read_checkpoint(tmp_path / name)["global_step"] for name in ("new/a.ckpt", "last.ckpt")] == [1, 2]


@pytest.mark.parametrize("at_once", [True, False], ids=["exchange", "two renames"])
def test_replaces_a_directory(at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run goes on without ``sharded=True``."""
    if not at_once:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    path = tmp_path / "last.ckpt"
    save_sharded(example(1), path)
    save(path, 2)
    assert path.is_file()
    assert read_checkpoint(path)["global_step"] == 2
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_directory_is_found_while_a_file_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two renames; the next save removes it."""

    class Killed(BaseException):
        pass

    def rename(source: str, target: str) -> None:
        if target == str(path):
            raise Killed
        original(source, target)

    original, path = os.rename, tmp_path / "last.ckpt"
    save_sharded(example(1), path)
    with monkeypatch.context() as patches:
        patches.setattr(files, "exchange", lambda one, other: False)
        patches.setattr(files.os, "rename", rename)
        with pytest.raises(Killed):
            save(path, 2)
    assert not path.exists()
    assert is_sharded(path)
    save(path, 2)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_names_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    save(tmp_path / ("ä" * 125 + ".ckpt"))


def test_removes(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    save(tmp_path / "b.ckpt" / "part")
    (tmp_path / "link.ckpt").symlink_to("b.ckpt")
    for name in ("a.ckpt", "link.ckpt", "not there.ckpt"):
        remove_checkpoint(tmp_path / name)
    assert os.listdir(tmp_path) == ["b.ckpt"]
    remove_checkpoint(str(tmp_path / "b.ckpt"))
    assert os.listdir(tmp_path) == []


# ---- what others left ----


def test_removes_files_of_writers_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / temporary_name("a.ckpt")).write_bytes(b"half")
    (tmp_path / temporary_name("b.ckpt") / "part").mkdir(parents=True)
    theirs = [".tmp-mine", "x.tmp-a-0123456789abcdef", temporary_name("link")]
    for name in theirs[:2]:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / theirs[2]).symlink_to("precious")
    save(tmp_path / "a.ckpt")
    assert sorted(os.listdir(tmp_path)) == sorted([*theirs, "precious", "a.ckpt"])
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_leaves_the_file_of_a_writer_that_lives(tmp_path: Path) -> None:
    half, go_on = threading.Event(), threading.Event()

    def dump(file: Any) -> None:
        half.set()
        assert go_on.wait(20)
        torch.save(example(1), file)

    writer = threading.Thread(target=write_file, args=(dump, str(tmp_path / "a.ckpt"), 0))
    writer.start()
    assert half.wait(20)
    save(tmp_path / "b.ckpt", 2)
    assert remove_strays(str(tmp_path)) == []
    go_on.set()
    writer.join()
    assert [read_checkpoint(tmp_path / name)["global_step"] for name in ("a.ckpt", "b.ckpt")] == [1, 2]


def test_without_locks_only_old_files_are_strays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(temporary.fcntl, "flock", no_locks)
    young, old = temporary_name("a.ckpt"), temporary_name("a.ckpt")
    for name in (young, old):
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / old, (0, 0))
    save(tmp_path / "a.ckpt")
    assert sorted(os.listdir(tmp_path)) == [young, "a.ckpt"]


# ---- failures ----


def failing(dump: Callable[[Any], None], path: Path, needed: int = 12345) -> OSError:
    """The error of overwriting a checkpoint, which has to be intact afterwards, with nothing beside it."""
    with pytest.raises(OSError, match="could not save a checkpoint, which needs") as caught:
        write_file(dump, str(path), needed)
    assert caught.value.filename == str(path)
    assert f"{needed} bytes" in str(caught.value)
    if path.parent.exists():
        assert os.listdir(path.parent) == [path.name]
        assert_equal(read_checkpoint(path), example())
    return caught.value


def test_too_large_for_the_file_system(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    error = failing(dump_of(example(2)), tmp_path / "a.ckpt", 10**15)
    assert error.errno == errno.ENOSPC
    assert "bytes are free" in str(error)


@pytest.mark.parametrize("part", [0, 100, 4000])
def test_writing_fails_half_way(part: int, tmp_path: Path) -> None:
    """torch's own error for that would be about an ``unexpected pos``."""
    save(tmp_path / "a.ckpt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (part, before[1]))
    try:
        error = failing(dump_of({"big": torch.zeros(10**6)}), tmp_path / "a.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.errno == errno.EFBIG


def test_the_directory_is_removed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.ckpt"
    save(path)

    def dump(file: Any) -> None:
        torch.save(example(2), file)
        remove_checkpoint(path.parent)

    assert isinstance(failing(dump, path), FileNotFoundError)


def test_the_disk_returns_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.ckpt")
    fsync = os.fsync

    def sync_and_damage(descriptor: int) -> None:
        fsync(descriptor)
        os.pwrite(descriptor, b"?", 300)

    monkeypatch.setattr(files.os, "fsync", sync_and_damage)
    error = failing(dump_of(example(2)), tmp_path / "a.ckpt")
    assert error.errno == errno.EIO
    assert "differs from what was written" in str(error)


def test_what_cannot_be_pickled(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")
    with pytest.raises(AttributeError, match="local object"):
        write_checkpoint(dump_of({"hook": lambda: None}), tmp_path / "a.ckpt", 0)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_interrupted(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt")

    def dump(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(dump, str(tmp_path / "a.ckpt"), 0)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert_equal(read_checkpoint(tmp_path / "a.ckpt"), example())


IN_A_SMALL_FILE_SYSTEM = """
set -e
mount -t tmpfs -o size=1m tmpfs "$1"
"$2" - "$1" <<'PROGRAM'
import errno, subprocess, sys
from pathlib import Path
import torch
from tests.checkpoint.models import save
from tests.checkpoint.test_files import failing
from lightning_smddp.checkpoint.contents import dump_of
path = Path(sys.argv[1], "a.ckpt")
save(path)
big = dump_of({"big": torch.zeros(10**6)})
assert failing(big, path, needed=10).errno == errno.ENOSPC
assert failing(big, path, needed=4 * 10**6).errno == errno.ENOSPC
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
assert failing(dump_of({}), path, needed=10).errno == errno.EROFS
print("all as expected")
PROGRAM
"""


@pytest.mark.slow
def test_disk_full_and_read_only(tmp_path: Path) -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    allowed = subprocess.run(
        [*command, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if allowed.returncode != 0:
        pytest.skip(f"no file systems can be mounted here: {allowed.stderr.decode().strip()}")
    result = subprocess.run(
        [*command, "bash", "-c", IN_A_SMALL_FILE_SYSTEM, "bash", str(tmp_path), sys.executable],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == "all as expected\n", result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.ckpt"
    save(path)
    path.parent.chmod(0o500)
    try:
        assert isinstance(failing(dump_of({}), path), PermissionError)
    finally:
        path.parent.chmod(0o700)
