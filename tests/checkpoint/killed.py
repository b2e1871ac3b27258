"""A program that saves checkpoints and is killed: ``python -m tests.checkpoint.killed random|boundaries ...``.

Each save happens in a forked child. The parent then looks what can be loaded, and prints its findings as JSON. Not
done in pytest's own process, which has threads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lightning_smddp.checkpoint.contents import bytes_needed, dump_of
from lightning_smddp.checkpoint.errors import CheckpointError
from lightning_smddp.checkpoint.files import write_file
from lightning_smddp.checkpoint.newest import newest_checkpoint
from lightning_smddp.checkpoint.reading import read_checkpoint

# Calls that change files; the others only matter to who wants to see every place.
CHANGING = {"write", "flush", "fsync", "replace", "open", "unlink", "mkdir", "flock"}
PACKAGE = f"{os.sep}lightning_smddp{os.sep}checkpoint{os.sep}"


def checkpoint(step: int, values: int = 20_000) -> dict[str, Any]:
    return {"step": step, "state_dict": {name: torch.full((values,), float(step)) for name in "abc"}}


def save(contents: dict[str, Any], path: str) -> None:
    write_file(dump_of(contents), path, bytes_needed(contents))


def loaded_step(path: Path) -> int | None:
    """The step of the checkpoint at ``path``; None if it cannot be loaded."""
    try:
        loaded = read_checkpoint(path)
    except (CheckpointError, FileNotFoundError):
        return None
    assert all(torch.equal(t, torch.full_like(t, loaded["step"])) for t in loaded["state_dict"].values())
    return int(loaded["step"])


def strays(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".tmp-")]


def in_child(body: Callable[[], None]) -> int:
    """Start ``body`` in a fork; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(0)
    return child


# ---- at random times ----


def random_kills(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    """Overwrite one checkpoint again and again; after each kill it has to be there."""
    path, pick = directory / "last.ckpt", random.Random(seed)
    save(checkpoint(0), str(path))
    lost, stray, steps = 0, 0, [0]
    for _ in range(kills):

        def overwrite() -> None:
            step = steps[-1]
            while True:
                step += 1
                save(checkpoint(step), str(path))

        child = in_child(overwrite)
        time.sleep(pick.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step = loaded_step(path)
        stray += len(strays(directory))
        lost += step is None or step < steps[-1]
        steps.append(step or 0)
        save(checkpoint(steps[-1]), str(path))
        assert not strays(directory), "the next save removes what the killed one left"
    return {"lost": lost, "stray": stray, "saves": steps[-1]}


# ---- before and after every call of ours into C ----


class KillAt:
    """Kills this process at event ``number``: the n-th begin or end of a call of our code into C."""

    def __init__(self, number: int, everywhere: bool) -> None:
        self.left, self.everywhere, self.seen = number, everywhere, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("c_call", "c_return") or PACKAGE not in frame.f_code.co_filename:
            return
        if not self.everywhere and argument.__name__ not in CHANGING:
            return
        self.seen += 1
        if self.seen == self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def boundary_kills(directory: Path, everywhere: bool, every: int) -> dict[str, Any]:
    """Overwrite a checkpoint of step 1 by one of step 2, and be killed in every place, of which the last is `kills`."""
    path = directory / "last.ckpt"
    old, new, lost, number = 0, 0, 0, 0
    while True:
        number += every
        save(checkpoint(1, 100), str(path))

        def overwrite(number: int = number) -> None:
            sys.setprofile(KillAt(number, everywhere))
            save(checkpoint(2, 100), str(path))

        child = in_child(overwrite)
        _, status = os.waitpid(child, 0)
        step = loaded_step(path)
        found = newest_checkpoint([directory], report=lambda line: None)
        if step is None or found != str(path):
            lost += 1
        old, new = old + (step == 1), new + (step == 2)
        if not os.WIFSIGNALED(status):  # it came to the end
            return {"old": old, "new": new, "lost": lost, "kills": number - every}


def in_place_kills(directory: Path) -> dict[str, Any]:
    """The control: killed after each write of ``torch.save`` to the file itself."""
    path = directory / "last.ckpt"
    lost = kills = 0
    for kills in range(1, 20):
        torch.save(checkpoint(1, 100), path)

        class Dying:
            def __init__(self, left: int = kills) -> None:
                self.file, self.left = path.open("wb", buffering=0), left

            def write(self, data: Any) -> int:
                self.left -= 1
                if self.left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return self.file.write(data) or 0

            def flush(self) -> None: ...

        os.waitpid(in_child(lambda dying=Dying: torch.save(checkpoint(2, 100), dying())), 0)
        lost += loaded_step(path) is None
    return {"lost": lost, "kills": kills}


def main(mode: str, directory: str, *rest: str) -> None:
    torch.set_num_threads(1)
    if mode == "random":
        found = random_kills(Path(directory), int(rest[0]), int(rest[1]))
    else:
        found = boundary_kills(Path(directory), rest[0] == "everywhere", int(rest[1]))
        found["control"] = in_place_kills(Path(directory))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
