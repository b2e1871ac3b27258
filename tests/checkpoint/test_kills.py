"""Processes killed while they save: a whole checkpoint is there, whenever it happens."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from lightning_smddp.checkpoint import files, sharded
from lightning_smddp.checkpoint.newest import newest_checkpoint
from tests.checkpoint.models import assert_equal
from tests.ranks import run_ranks

# Calls that change files, and who makes them.
CHANGING = {"write", "flush", "fsync", "replace", "rename", "open", "unlink", "mkdir", "rmdir", "close", "rmtree"}
CHANGERS = ("lightning_smddp/checkpoint/", "shutil.py", "pathlib", "torch/distributed/checkpoint/", __file__)


def example(step: int) -> dict[str, Any]:
    """A small one, as each tensor adds places."""
    return {"step": step, "state_dict": {name: torch.full((50,), float(step)) for name in "abc"}}


class Written:
    """A file whose writes torch makes here, where they are seen."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        return int(self.file.write(data))

    def flush(self) -> None:
        self.file.flush()


def save(step: int, path: Path, directory: bool) -> None:
    if directory:
        sharded.save(example(step), path)
    else:
        files.write(lambda file: torch.save(example(step), Written(file)), path)


class KillAt:
    """Kills this process at event ``number``: a begin or end of a call into C that changes files."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("c_call", "c_return") or argument.__name__ not in CHANGING:
            return
        if any(place in frame.f_code.co_filename for place in CHANGERS):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def kills_at_each_place(directory: bool, every: int, where: Path) -> list[int]:
    """Overwrite a checkpoint of step 1 by one of step 2, killed at every ``every``-th place; the steps found then."""
    path, load, found = where / "last.ckpt", sharded.load if directory else files.load, []
    while True:
        save(1, path, directory)
        assert os.listdir(where) == ["last.ckpt"], "the next save removes what the killed one left"
        child = os.fork()
        if child == 0:
            try:
                sys.setprofile(KillAt(every * (len(found) + 1)))
                save(2, path, directory)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        loaded, newest = load(path), newest_checkpoint([where], report=lambda line: None)
        found.append(loaded["step"])
        assert_equal(loaded, example(found[-1]))
        assert newest is not None
        load(newest)
        if not os.WIFSIGNALED(status):  # it came to the end
            return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("directory", "every"), [(False, 4), (True, 12), pytest.param(True, 1, marks=pytest.mark.exhaustive)]
)
def test_before_and_after_every_call(directory: bool, every: int, tmp_path: Path) -> None:
    prefix = f"tests-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as memory:  # where nobody waits for a disk
        env = {"TMPDIR": str(tmp_path)}
        [steps] = run_ranks(kills_at_each_place, 1, directory, every, Path(memory), init=False, env=env, timeout=110.0)
    assert every * (len(steps) - 1) > 20
    assert steps.count(1) > 5
    assert steps.count(2) > 1  # one of them is the save that nobody killed
    assert os.listdir(tmp_path) == [], "nothing of ours goes to TMPDIR"
