"""A program that saves checkpoints and is killed: ``python -m tests.checkpoint.killed KIND EVERY DIRECTORY``.

KIND is ``file`` or ``directory``. EVERY is 1 for a kill at each place, 8 for one at every eighth. Each save happens in
a forked child; the parent then looks what can be loaded, and prints its findings as JSON. Not done in pytest's own
process, which has threads.
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

from lightning_smddp.checkpoint import files, sharded
from lightning_smddp.checkpoint.files import CheckpointError
from lightning_smddp.checkpoint.newest import newest_checkpoint

# Calls that change files, and who makes them.
CHANGING = {"write", "flush", "fsync", "replace", "rename", "open", "unlink", "mkdir", "rmdir", "close", "rmtree"}
CHANGERS = ("lightning_smddp/checkpoint/", "shutil.py", "pathlib", "torch/distributed/checkpoint/")


def checkpoint(step: int) -> dict[str, Any]:
    return {"step": step, "state_dict": {name: torch.full((50,), float(step)) for name in "abc"}}


class Written:
    """A plain file whose writes torch makes here, where they are seen."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        return int(self.file.write(data))

    def flush(self) -> None:
        self.file.flush()

    @staticmethod
    def save(contents: Any, path: Path) -> None:
        files.write(lambda file: torch.save(contents, Written(file)), path)

    load = staticmethod(files.load)


KINDS: dict[str, Any] = {"file": Written, "directory": sharded}


def loaded_step(kind: str, path: str | Path | None) -> int | None:
    """The step of the checkpoint at ``path``; None if it cannot be loaded."""
    if path is None:
        return None
    try:
        loaded = KINDS[kind].load(path)
        assert all(torch.equal(t, torch.full_like(t, loaded["step"])) for t in loaded["state_dict"].values())
    except (CheckpointError, OSError):
        return None
    return int(loaded["step"])


class KillAt:
    """Kills this process at event ``number``: a begin or end of a call into C that changes files."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("c_call", "c_return") or argument.__name__ not in CHANGING:
            return
        if any(place in frame.f_code.co_filename for place in (*CHANGERS, __file__)):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def kills_at_each_place(kind: str, directory: Path, every: int) -> dict[str, int]:
    """Overwrite a checkpoint of step 1 by one of step 2, and be killed in every place, of which the last is `kills`."""
    path, save = directory / "last.ckpt", KINDS[kind].save
    found = {"old": 0, "new": 0, "lost": 0, "kills": 0}
    while True:
        number = found["kills"] + every
        save(checkpoint(1), path)
        assert os.listdir(directory) == ["last.ckpt"], "the next save removes what the killed one left"
        child = os.fork()
        if child == 0:
            try:
                sys.setprofile(KillAt(number))
                save(checkpoint(2), path)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        step = loaded_step(kind, path)
        newest = newest_checkpoint([directory], report=lambda line: None)
        found["lost"] += step is None or loaded_step(kind, newest) is None
        found["old"] += step == 1
        found["new"] += step == 2
        if not os.WIFSIGNALED(status):  # it came to the end
            return found
        found["kills"] = number


def main(kind: str, every: str, directory: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps(kills_at_each_place(kind, Path(directory), int(every))))


if __name__ == "__main__":
    main(*sys.argv[1:])
