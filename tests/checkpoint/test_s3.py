"""Checkpoints in a real S3 server on the loopback interface."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    fs.mkdir("bucket")
    yield "s3://bucket"
    fs.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def names(bucket: str) -> list[str]:
    return sorted(s3fs.S3FileSystem().find(bucket, refresh=True))


@pytest.mark.slow
def test_saves_overwrites_loads_and_removes(bucket: str) -> None:
    io, url = SafeCheckpointIO(), f"{bucket}/run/a.ckpt"
    for step in (1, 2):
        io.save_checkpoint(example(step), url)
        assert_equal(io.load_checkpoint(url), example(step))
    assert names(bucket) == ["bucket/run/a.ckpt"]
    io.remove_checkpoint(url)
    io.remove_checkpoint(url)
    assert names(bucket) == []
    with pytest.raises(FileNotFoundError, match="bucket/run/a.ckpt"):
        io.load_checkpoint(url)


def test_damage_and_the_newest(bucket: str) -> None:
    for step, name in enumerate("abc"):  # S3 has times in seconds: of equal ones the last name counts
        save(f"{bucket}/run/{name}.ckpt", step)
    fs = s3fs.S3FileSystem()
    data = bytearray(fs.cat("bucket/run/c.ckpt"))
    data[len(data) // 2] ^= 1
    fs.pipe("bucket/run/c.ckpt", bytes(data))
    with pytest.raises(CheckpointError, match="s3://bucket/run/c.ckpt: .*damaged"):
        files.load(f"{bucket}/run/c.ckpt")
    lines: list[str] = []
    assert newest_checkpoint([f"{bucket}/run"], report=lines.append) == "s3://bucket/run/b.ckpt"
    assert len(lines) == 1
