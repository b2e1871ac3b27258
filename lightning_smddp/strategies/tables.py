"""Tables for people, with rich where it is installed."""

from __future__ import annotations

from importlib.util import find_spec


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print ``rows`` of name and value."""
    if find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, show_header=False, title_justify="left")
        for name, value in rows:
            table.add_row(name, value)
        Console().print(table)
        return
    width = max(len(name) for name, _ in rows)
    print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)]), flush=True)
