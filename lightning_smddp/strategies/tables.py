"""Tables and lines for people. Nothing that is only said can fail a run."""

from __future__ import annotations

import os
import sys
from typing import Any


def say(text: str, trainer: Any = None) -> None:
    """Print ``text``, on the process's own stderr where stdout raises, as a pipe does whose reader has gone.

    Whole lines are written at once: a part of one that waits in the stdout of rich's progress bar makes it print itself
    in a notebook, again and again.

    Args:
        text: lines.
        trainer: whose progress bar may be in the middle of a line.
    """
    if trainer is not None and trainer.progress_bar_callback is not None:
        text = f"\n{text}"
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except Exception as error:
        os.write(2, f"lightning-smddp: stdout raised {type(error).__name__}\n{text}\n".encode(errors="replace"))


def print_table(title: str, rows: list[tuple[str, str]], trainer: Any = None) -> None:
    """Print ``rows`` of name and value in two columns."""
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    say("\n".join([title, *lines]), trainer)
