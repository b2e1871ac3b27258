"""A program that saves directories and is killed: ``python -m tests.checkpoint.killed_sharded WAY EVERY DIRECTORY``.

WAY is ``exchange`` or ``renames``; EVERY is 1 for a kill at each place, 8 for one at every eighth. As ``killed.py``:
each save happens in a forked child, and the parent looks what can be loaded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lightning_smddp.checkpoint import files
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.newest import newest_checkpoint
from lightning_smddp.checkpoint.sharded import load_sharded, save_sharded
from tests.checkpoint.killed import PACKAGE, in_child

CHANGING = {"write", "flush", "fsync", "replace", "rename", "open", "unlink", "mkdir", "rmdir", "flock", "close"}


def save(step: int, path: Path) -> None:
    save_sharded({"step": step, "state_dict": {name: torch.full((50,), float(step)) for name in "ab"}}, path)


def loaded_step(path: str | Path) -> int | None:
    """The step of the checkpoint at ``path``; None if it cannot be loaded."""
    try:
        loaded = load_sharded(path)
    except (CheckpointError, FileNotFoundError):
        return None
    assert all(torch.equal(t, torch.full_like(t, loaded["step"])) for t in loaded["state_dict"].values())
    return int(loaded["step"])


class KillAt:
    """Kills this process at event ``number``: a begin or end of a call into C that changes files, ours or shutil's."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        place = frame.f_code.co_filename
        if event not in ("c_call", "c_return") or not (PACKAGE in place or place.endswith("shutil.py")):
            return
        if argument.__name__ in CHANGING:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def kills(directory: Path, every: int) -> dict[str, int]:
    """Overwrite a checkpoint of step 1 by one of step 2, and be killed in every place, of which the last is `kills`."""
    path = directory / "last.ckpt"
    found = {"old": 0, "new": 0, "lost": 0, "kills": 0}
    while True:
        number = found["kills"] + every
        save(1, path)
        assert os.listdir(directory) == ["last.ckpt"], "the next save removes what the killed one left"

        def overwrite(number: int = number) -> None:
            sys.setprofile(KillAt(number))
            save(2, path)

        _, status = os.waitpid(in_child(overwrite), 0)
        newest = newest_checkpoint([directory], report=lambda line: None)
        step = loaded_step(path)
        if step is None or newest is None or loaded_step(newest) is None:
            found["lost"] += 1
        found["old"] += step == 1
        found["new"] += step == 2
        if not os.WIFSIGNALED(status):  # it came to the end
            return found
        found["kills"] = number


def main(way: str, every: str, directory: str) -> None:
    torch.set_num_threads(1)
    if way == "renames":
        files.exchange = lambda one, other: False
    print(json.dumps(kills(Path(directory), int(every))))


if __name__ == "__main__":
    main(*sys.argv[1:])
