"""What the benchmarks share: starting ranks, timing arms in rotation, statistics, and the record of a result.

Run as a script this file is a rank: ``launch`` starts one process per rank, which calls a function of the benchmark
and, on rank 0, writes what it returned to a file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"
METHOD = """\
Arms take turns in one run, in a new random order each round, after a barrier each. *Wall* is the time from the last
rank's start to the last rank's end. *CPU* is the processor time of all threads of all ranks together. *Best* is the
fastest repeat, *median* the middle one; ratios above 1 are in favour of the arm."""


# ---------------------------------------------------------------------------------------------------------- ranks


def launch(
    target: str,
    world_size: int,
    arguments: Mapping[str, Any],
    prefixes: Sequence[Sequence[str]] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> Any:
    """Run function ``target`` (``"module:function"``) in ``world_size`` processes; returns what rank 0 returns.

    Args:
        target: called with ``arguments`` in a process with one torch thread and a gloo group of all ranks.
        world_size: number of ranks.
        arguments: keyword arguments; what JSON can carry.
        prefixes: for each rank what its command starts with, such as ``ip netns exec NAME``.
        env: environment variables on top of this process's own.
        timeout_s: after which the ranks are killed.

    Raises:
        RuntimeError: a rank failed (its traceback is on stderr) or took too long. No rank is left behind.
    """
    processes: list[subprocess.Popen[bytes]] = []
    before = _left_by_deepspeed()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        job = Path(directory, "job.json")
        job.write_text(json.dumps({"target": target, "arguments": dict(arguments), "world_size": world_size}))
        try:
            for rank in range(world_size):
                command = [*(prefixes[rank] if prefixes else ()), sys.executable, __file__, directory]
                variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LOCAL_RANK": str(rank), "RANK": str(rank)}
                processes.append(subprocess.Popen(command, env={**os.environ, **variables, **(env or {})}))
            _wait(processes, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            for segment in _left_by_deepspeed() - before:
                segment.unlink(missing_ok=True)
        return json.loads(Path(directory, "result.json").read_text())


def _left_by_deepspeed() -> set[Path]:
    """Shared memory of DeepSpeed's own collectives on CPUs, 66 MiB a rank, which its ranks leave behind."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise RuntimeError(f"rank {failed[0]} ended with status {codes[failed[0]]}; its traceback is above")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {[rank for rank, code in enumerate(codes) if code is None]} hung")
        time.sleep(0.1)


def _rank_main(directory: str) -> None:
    job = json.loads(Path(directory, "job.json").read_text())
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    store = Path(directory, "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job["world_size"])
    module, function = job["target"].split(":")
    result = getattr(importlib.import_module(module), function)(**job["arguments"])
    if rank == 0:
        Path(directory, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------------- timing


def interleave(
    arms: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    block: int = 1,
    solo: Iterable[str] = (),
) -> dict[str, dict[str, list[float]]]:
    """Time all arms in rotation; returns for each arm ``wall_ms`` and ``cpu_ms`` of each repeat. Collective.

    Args:
        arms: called without arguments, the same ones on all ranks.
        rounds: how often each arm has its turn.
        warmup: rounds before these, not counted.
        block: repeats in each turn.
        solo: arms that run on rank 0 only, while the others wait in a barrier.
    """
    solo = set(solo)
    rank, order = dist.get_rank(), random.Random(0)
    spans: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    for turn in range(-warmup, rounds):
        for name in order.sample(list(arms), len(arms)):
            for _ in range(block):
                if rank > 0 and name in solo:
                    dist.barrier()
                    continue
                dist.barrier()
                cpu, start = time.process_time(), time.perf_counter()  # perf_counter is one clock for all processes
                arms[name]()
                end = time.perf_counter()
                if turn >= 0:
                    spans[name].append((start, end, time.process_time() - cpu))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, spans)
    samples: dict[str, dict[str, list[float]]] = {}
    for name in arms:
        ranks = [theirs[name] for theirs in everyone if theirs[name]]
        repeats = list(zip(*ranks, strict=True))
        samples[name] = {
            "wall_ms": [1e3 * (max(end for _, end, _ in r) - max(start for start, _, _ in r)) for r in repeats],
            "cpu_ms": [1e3 * sum(cpu for _, _, cpu in r) for r in repeats],
        }
    return samples


@dataclass
class Stats:
    """Of one arm, in milliseconds."""

    best: float
    median: float
    cpu: float
    repeats: int

    @classmethod
    def of(cls, *samples: Mapping[str, list[float]]) -> Stats:
        """Of the repeats of one or several runs together."""
        wall = [value for sample in samples for value in sample["wall_ms"]]
        cpu = [value for sample in samples for value in sample["cpu_ms"]]
        return cls(min(wall), statistics.median(wall), statistics.median(cpu), len(wall))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole tensor, in the Euclidean norm."""
    return float((actual - expected).norm() / expected.norm())


# --------------------------------------------------------------------------------------------------------- record


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    cells = [list(headings), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        padded = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(cells[0]), f"|{rule}|", *(line(row) for row in cells[1:])])


def _text(cell: Any) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"


def target(name: str, value: float, limit: float, at_least: bool, unit: str = "") -> str:
    """A line that says whether ``value`` reached ``limit``."""
    reached = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    return f"- {name}: {value:.2f}{unit} (target {sign} {limit:g}{unit}): {'reached' if reached else '**not reached**'}"


@dataclass
class Record:
    """A result as Markdown for people and JSON for ``plot.py``."""

    name: str
    title: str
    options: argparse.Namespace
    ceiling: str
    method: str = METHOD
    sections: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    def section(self, heading: str, *parts: str) -> None:
        """Add a section and print it."""
        self.sections.append("\n\n".join([f"## {heading}", *parts]))
        print(self.sections[-1], end="\n\n", flush=True)

    def finish(self) -> None:
        """Write the files if ``--record`` was given."""
        header = f"# {self.title}\n\n{_facts(self.load)}\n\n{self.method}\n\n*Ceiling*: {self.ceiling}"
        if not self.options.record:
            return
        RESULTS.mkdir(exist_ok=True)
        stem = RESULTS / f"{self.name}_{self.options.hardware}_{date.today()}"
        stem.with_name(stem.name + ".md").write_text("\n\n".join([header, *self.sections]) + "\n")
        facts = {"name": self.name, "date": str(date.today()), "hardware": _hardware(), "command": _command()}
        stem.with_name(stem.name + ".json").write_text(json.dumps({**facts, **self.data}, indent=1) + "\n")
        print(f"recorded in benchmarks/results/{stem.name}.md and .json")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark."""
    options = argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="few repeats of small cases: does it work?")
    options.add_argument("--record", action="store_true", help="write the dated files in benchmarks/results/")
    options.add_argument("--hardware", default=f"{os.cpu_count()}cpu", help="a short name, for the files' names")
    return options


def _facts(load: float) -> str:
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("lightning-smddp", "torch", "lightning"))
    return "\n".join(
        [
            f"- date: {date.today()}",
            f"- command: `{_command()}`",
            f"- versions: {packages}, Python {platform.python_version()}, Linux {platform.release().split('-')[0]}",
            f"- hardware: {_hardware()}",
            f"- load average before the run: {load:.2f}; one torch thread for each rank",
        ]
    )


def _command() -> str:
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def _hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    virtual = ", virtual machine" if any("hypervisor" in line for line in lines) else ""
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{os.cpu_count()} CPUs ({model}, {isa}{virtual}), {memory:.0f} GiB of memory"


if __name__ == "__main__":
    _rank_main(sys.argv[1])
