"""Training processes that work in turns, so that a busy moment of the machine hits all alike; used by the demos."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

OUTPUT = Path("demo_output")
TURN_TIMEOUT_S = 300  # the first turn starts processes, which a busy machine delays


def take_turn(trainer, turns: list[int]) -> None:
    """In a training process: end this turn and wait for the next one. ``turns`` is a pipe to read, and one to write."""
    if trainer.is_global_zero:
        os.write(turns[1], b".")
        os.read(turns[0], 1)
    trainer.strategy.barrier()


def quiet() -> None:
    """No advice, no progress, no warnings: the demonstration has one table of its own."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    import lightning.pytorch  # noqa: F401  # sets its log levels when it is imported

    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Arm:
    """A process that works when it is given a turn: a script with arguments, which writes files called ``name``."""

    def __init__(self, script: str, arguments: list[str], name: str) -> None:
        self.out = OUTPUT / name
        their_turn, self.give = os.pipe()
        self.ended, their_end = os.pipe()
        self.command = [sys.executable, script, *arguments, "--out", str(self.out)]
        self.command += ["--turns", str(their_turn), str(their_end)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "XDG_CACHE_HOME": str((OUTPUT / "cache").resolve()),  # so that the algorithms are measured here and now
        }
        with self.out.with_suffix(".out").open("w") as stdout, self.out.with_suffix(".err").open("w") as stderr:
            self.process = subprocess.Popen(
                self.command,
                env=environment,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[their_turn, their_end],
                start_new_session=True,
            )
        os.close(their_turn)
        os.close(their_end)

    def turn(self) -> bool:
        """Let it work for a turn; False once it has finished."""
        with contextlib.suppress(BrokenPipeError):  # it failed: seen below
            os.write(self.give, b".")
        return self.wait_for_end()

    def wait_for_end(self) -> bool:
        """Wait until it wants another turn (True) or has finished (False)."""
        if not select.select([self.ended], [], [], TURN_TIMEOUT_S)[0]:
            self.fail("hangs")
        if os.read(self.ended, 1):
            return True
        if self.process.wait(TURN_TIMEOUT_S):
            self.fail("failed")
        os.close(self.give)
        os.close(self.ended)
        return False

    def fail(self, how: str) -> None:
        raise SystemExit(f"{' '.join(self.command)} {how}:\n{self.out.with_suffix('.err').read_text()}")

    def kill(self) -> None:
        """Kill all its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self) -> dict:
        """What it wrote; the strategy's own table is there as ``table``."""
        numbers = json.loads(self.out.with_suffix(".json").read_text())
        table = self.out.with_suffix(".out").read_text().partition("gradient communication over")[0]
        return {**numbers, "table": table.strip()}


def run_in_turns(arms: dict[str, Arm]) -> dict[str, dict]:
    """Let all arms train, one at a time and in short turns; returns what they wrote."""
    try:
        waiting = [arm for arm in arms.values() if arm.wait_for_end()]
        while waiting:
            waiting = [arm for arm in waiting if arm.turn()]
    finally:
        for arm in arms.values():
            arm.kill()
    return {name: arm.result() for name, arm in arms.items()}


def print_table(title: str, header: list[str], sections: dict[str, list[list[str]]]) -> None:
    """With rich if that is installed. ``sections``: heading -> rows."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for heading, rows in sections.items():
            for cells in ([heading, *header[1:]], *rows):
                print("  ".join(f"{cell:<16}" for cell in cells))
        return
    table = Table(*header, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading, rows in sections.items():
        table.add_section()
        if heading:
            table.add_row(f"[bold]{heading}", end_section=False)
        for cells in rows:
            table.add_row(*cells)
    Console(width=max(80, Console().width)).print(table)
