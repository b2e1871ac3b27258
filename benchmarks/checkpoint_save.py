"""How long saving a checkpoint keeps training waiting, and what memory it takes, against torch.save and Lightning.

Each arm overwrites its own file. What it has written is read back and compared before anything is timed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Record, Stats, interleave, launch, parser, table
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_smddp import SafeCheckpointIO

MIB = 2**20
ARMS = {
    "torch.save": "to the file itself",
    "torch.save, fsync": "and wait for the disk",
    "Lightning": "`TorchCheckpointIO`",
    "ours": "`SafeCheckpointIO()`",
    "ours, asynchronous": "`SafeCheckpointIO(asynchronous=True)`: until training goes on",
}


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, default=400)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--directory", default=None, help="on the file system in question; by default TMPDIR's")
    args = options.parse_args()
    if args.quick:
        args.megabytes, args.rounds = 20, 2
    record = Record(
        "checkpoint_save",
        "Saving a checkpoint",
        args,
        "torch.save with fsync: nothing that is on the disk afterwards can take less.",
    )
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        job = {"megabytes": args.megabytes, "directory": directory}
        samples, written = launch("checkpoint_save:rank_main", 1, {**job, "rounds": args.rounds})
        peaks = {arm: launch("checkpoint_save:peak_main", 1, {**job, "arm": arm}) for arm in ARMS}
    record.data |= {"samples": samples, "asynchronous_written_s": written, "peaks": peaks}
    rows = []
    base = Stats.of(samples["torch.save, fsync"])
    for arm, what in ARMS.items():
        stats = Stats.of(samples[arm])
        ratio = base.median / stats.median
        rows.append([f"{arm} ({what})", stats.best / 1e3, stats.median / 1e3, stats.cpu / 1e3, ratio, peaks[arm] / MIB])
    headings = ["arm", "best s", "median s", "CPU s", "x fsync", "peak MiB"]
    record.section(
        f"{args.megabytes} MB of tensors",
        table(headings, rows),
        "*Peak* is of resident memory, above what the process had before. *CPU* of the asynchronous arm is that of the "
        f"copy; its file was complete after {sorted(written)[len(written) // 2]:.2f} s (median).",
    )
    record.finish()


def rank_main(megabytes: int, directory: str, rounds: int) -> tuple[dict[str, Any], list[float]]:
    """Times of all arms, and how long it took until the asynchronous one's file was complete."""
    contents = _contents(megabytes)
    io = SafeCheckpointIO(asynchronous=True)
    written: list[float] = []
    arms = {arm: _arm(arm, contents, directory, io) for arm in ARMS}

    def asynchronous() -> None:
        start = time.perf_counter()
        arms["ours, asynchronous"]()
        written.append(start)

    timed = {**arms, "ours, asynchronous": asynchronous}
    samples: dict[str, Any] = {}
    for arm in ARMS:
        arms[arm]()
    io.teardown()
    for arm in ARMS:
        loaded = torch.load(Path(directory, arm), weights_only=True)
        assert all(torch.equal(loaded["state_dict"][name], t) for name, t in contents["state_dict"].items()), arm
    durations = []
    for _ in range(rounds):
        one = interleave({name: f for name, f in timed.items() if name != "ours, asynchronous"}, 1, warmup=0)
        last = interleave({"ours, asynchronous": asynchronous}, 1, warmup=0)  # alone: others must not meet its thread
        io.teardown()
        durations.append(time.perf_counter() - written[-1])
        for name, values in {**one, **last}.items():
            mine = samples.setdefault(name, {key: [] for key in values})
            for key, numbers in values.items():
                mine[key] += numbers
    return samples, durations


def peak_main(megabytes: int, directory: str, arm: str) -> int:
    """Bytes of resident memory that one save takes at its peak."""
    contents = _contents(megabytes)
    io = SafeCheckpointIO(asynchronous=True)
    _arm(arm, _contents(1), directory, io)()  # imports
    io.teardown()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    _arm(arm, contents, directory, io)()
    io.teardown()
    return _resident("VmHWM") - before


def _arm(name: str, contents: dict[str, Any], directory: str, asynchronous: SafeCheckpointIO) -> Callable[[], None]:
    path = Path(directory, name)

    def synced() -> None:
        with path.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())

    savers = {
        "Lightning": TorchCheckpointIO(),
        "ours": SafeCheckpointIO(),
        "ours, asynchronous": asynchronous,
    }
    if name == "torch.save":
        return lambda: torch.save(contents, path)
    return synced if name == "torch.save, fsync" else lambda: savers[name].save_checkpoint(contents, path)


def _contents(megabytes: int) -> dict[str, Any]:
    """As of a model of layers of 4 MB."""
    generator = torch.Generator().manual_seed(0)
    state = {f"layer{i}": torch.rand(1_000_000, generator=generator) for i in range(max(1, megabytes // 4))}
    return {"state_dict": state, "epoch": 0}


def _resident(field: str) -> int:
    """Bytes, from ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
