"""Checkpoints in a real S3 server on the loopback interface."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_smddp import CheckpointError, SafeCheckpointIO
from lightning_smddp.checkpoint import files
from lightning_smddp.checkpoint.newest import newest_checkpoint
from tests.checkpoint.models import assert_equal, example, save

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.stdout.readline().decode().strip())
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"
        s3fs.S3FileSystem.clear_instance_cache()
        server.kill()


def fail_half_way(file: Any) -> None:
    file.write(b"half")
    raise OSError("the network is gone")


@pytest.mark.slow
def test_checkpoints(bucket: str) -> None:
    """Saved, overwritten, not overwritten by half of one, loaded and removed; damage, and the newest one."""
    io, url, fs = SafeCheckpointIO(), f"{bucket}/run/a.ckpt", s3fs.S3FileSystem()
    for step in (1, 2):
        io.save_checkpoint(example(step), url)
        assert_equal(io.load_checkpoint(url), example(step))
    with pytest.raises(OSError, match="the network is gone: could not save a checkpoint") as caught:
        files.write(fail_half_way, url)
    assert caught.value.filename == url
    assert_equal(files.load(url), example(2))
    assert fs.find(bucket, refresh=True) == ["bucket/run/a.ckpt"]
    with pytest.raises(OSError, match="could not save a checkpoint"):
        save("s3://mistyped/run/a.ckpt")
    assert fs.ls("", refresh=True) == ["bucket"]

    for name in "bc":  # S3 has times in seconds: of equal ones the last name counts
        save(f"{bucket}/run/{name}.ckpt")
    data = bytearray(fs.cat("bucket/run/c.ckpt"))
    data[len(data) // 2] ^= 1
    fs.pipe("bucket/run/c.ckpt", bytes(data))
    with pytest.raises(CheckpointError, match="s3://bucket/run/c.ckpt: .*damaged"):
        files.load(f"{bucket}/run/c.ckpt")
    lines: list[str] = []
    assert newest_checkpoint([f"{bucket}/run"], report=lines.append) == "s3://bucket/run/b.ckpt"
    assert len(lines) == 1

    for _ in range(2):
        io.remove_checkpoint(url)
    assert fs.find(bucket, refresh=True) == ["bucket/run/b.ckpt", "bucket/run/c.ckpt"]
    with pytest.raises(FileNotFoundError, match="bucket/run/a.ckpt"):
        io.load_checkpoint(url)
