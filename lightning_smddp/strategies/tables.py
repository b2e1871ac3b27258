"""Tables and lines for people, without wrong advice of Lightning's. Nothing that is only said can fail a run."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

_LEAST_WIDTH = 40  # of a value, however long the names are


def say(text: str, trainer: Any = None) -> None:
    """Print ``text``; where printing fails, write it to what stdout stands for, or to the process's own stderr.

    It does fail: a pipe whose reader has gone raises. Whole lines are written at once: a part of one that waits in the
    stdout of rich's progress bar makes it print itself in a notebook, again and again.

    Args:
        text: lines.
        trainer: whose progress bar may be in the middle of a line.
    """
    if trainer is not None and trainer.progress_bar_callback is not None:
        text = f"\n{text}"
    streams: list[Any] = [sys.stdout, getattr(sys.stdout, "rich_proxied_file", None)]
    for stream in streams:
        try:
            stream.write(f"{text}\n")
            stream.flush()
            return
        except Exception as error:
            os.write(2, f"lightning-smddp: stdout raised {type(error).__name__}\n".encode())
    os.write(2, f"{text}\n".encode(errors="replace"))


def print_table(title: str, rows: list[tuple[str, str]], trainer: Any = None) -> None:
    """Print ``rows`` of name and value, with rich where it is installed."""
    make = _with_rich if find_spec("rich") is not None else _plain
    say(make(title, rows), trainer)


def _with_rich(title: str, rows: list[tuple[str, str]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Lines of boxes are not in every encoding: a stdout of ASCII or latin-1 would raise where they are written.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    lines = box.HEAVY_HEAD if str(encoding).lower().startswith("utf") else box.ASCII2
    table = Table(title=title, show_header=False, title_justify="left", box=lines)
    for name, value in rows:
        table.add_row(name, value)
    drawn = io.StringIO()  # not stdout, of which a console wants to know more than whether it can be written to
    console = Console(file=drawn, width=shutil.get_terminal_size().columns)
    console.print(table)
    return drawn.getvalue().rstrip("\n")


def _plain(title: str, rows: list[tuple[str, str]]) -> str:
    # Two columns, each with two spaces before it; a long value goes on in lines of its own below its first one.
    width = max(len(name) for name, _ in rows)
    room = shutil.get_terminal_size().columns - width - len("    ")
    wrapper = textwrap.TextWrapper(max(_LEAST_WIDTH, room), break_long_words=False, break_on_hyphens=False)
    lines = [title]
    for name, value in rows:
        shown_name = name
        for part in wrapper.wrap(value) or [""]:
            lines.append(f"  {shown_name:<{width}}  {part}")
            shown_name = ""
    return "\n".join(lines)


@contextmanager
def without_warning(message: str) -> Iterator[None]:
    """In this context no warning whose text begins with ``message``, a regular expression."""
    # `warnings.catch_warnings` would also undo what users' code changes in here, which may be a whole fit. A filter
    # that was there already is only moved to the front, and is not ours to remove.
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message)
    entry = warnings.filters[0]
    try:
        yield
    finally:
        if entry not in before:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # a list; typeshed shows a Sequence
