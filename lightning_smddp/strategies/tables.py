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
    bar = None if trainer is None else trainer.progress_bar_callback
    if bar is not None:
        text = f"\n{text}"
    behind = getattr(sys.stdout, "rich_proxied_file", None)
    if not _is_printed(text, sys.stdout) and not _is_printed(text, behind):
        os.write(2, f"{text}\n".encode(errors="replace"))


def _is_printed(text: str, stream: Any) -> bool:
    if stream is None:
        return False
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except Exception as error:
        os.write(2, f"lightning-smddp: stdout raised {type(error).__name__}\n".encode())
        return False
    return True


def print_table(title: str, rows: list[tuple[str, str]], trainer: Any = None) -> None:
    """Print ``rows`` of name and value, with rich where it is installed."""
    make = _with_rich if find_spec("rich") is not None else _plain
    say(make(title, rows), trainer)


def _with_rich(title: str, rows: list[tuple[str, str]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    encoding = str(getattr(sys.stdout, "encoding", None) or "utf-8")
    lines = box.HEAVY_HEAD if encoding.lower().startswith("utf") else box.ASCII2
    table = Table(title=title, show_header=False, title_justify="left", box=lines)
    for name, value in rows:
        table.add_row(name, value)
    drawn = io.StringIO()  # not stdout, of which a console wants to know more than whether it can be written to
    Console(file=drawn, width=shutil.get_terminal_size().columns).print(table)
    return drawn.getvalue().rstrip("\n")


def _plain(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    room = max(_LEAST_WIDTH, shutil.get_terminal_size().columns - width - len("    "))
    lines = [title]
    for name, value in rows:
        parts = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"  {name:<{width}}  {parts[0]}")
        lines += [f"  {'':<{width}}  {part}" for part in parts[1:]]
    return "\n".join(lines)


@contextmanager
def without_warning(message: str) -> Iterator[None]:
    """In this context no warning whose text begins with ``message``, a regular expression."""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message)
    entry = warnings.filters[0]
    try:
        yield
    finally:
        if entry not in before:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # a list; typeshed shows a Sequence
