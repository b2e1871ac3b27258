"""Estimates as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from lightning_smddp.choice.estimates import Estimate

_NAME_WIDTH = 40  # characters, as the next
_WIDTH = 11
_PARTS = ("parameters", "gradients", "optimizer", "activ.", "communic.", "temporary")  # of `Memory`, in its order
_LEGEND = (
    "MiB a rank at its fullest moment, in parts; memory that ranks share is counted once. Beside it each process has "
    "what it has before training (Python, torch and Lightning: {process:.0f} MiB here)."
)


def as_text(title: str, estimates: Sequence[Estimate], notes: Sequence[str], process_bytes: int) -> str:
    """A table of memory and time, what does not work and why."""
    shown = [estimate for estimate in estimates if estimate.memory is not None]
    lines = [title, _line("", ["fits", "MiB", *_PARTS, "s a step", "rows a s"])]
    lines += [_row(estimate) for estimate in shown]
    lines.append("")
    lines.append(_LEGEND.format(process=process_bytes / 2**20))
    lines += _remarks(estimates)
    lines += notes
    return "\n".join(lines)


def _row(estimate: Estimate) -> str:
    assert estimate.memory is not None
    fits = "no"
    if estimate.fits:
        fits = "yes"
    parts = astuple(estimate.memory)
    sizes = [f"{size / 2**20:.0f}" for size in (estimate.memory.total, *parts)]
    times = ["", ""]
    if estimate.step_s and estimate.rows_per_s:
        times = [f"{estimate.step_s:.3g}", f"{estimate.rows_per_s:.3g}"]
    return _line(estimate.name, [fits, *sizes, *times])


def _line(name: str, values: Sequence[str]) -> str:
    columns = [f"{value:>{_WIDTH}}" for value in values]
    return f"  {name:<{_NAME_WIDTH}}" + "".join(columns)


def _remarks(estimates: Sequence[Estimate]) -> list[str]:
    remarks = []
    for estimate in estimates:
        for note in estimate.notes:
            if estimate.memory is None:
                remarks.append(f"{estimate.name} cannot train it: {note}")
            else:
                remarks.append(f"{estimate.name}: {note}")
    return remarks
