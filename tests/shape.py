"""The shape of a package: how long its files are, and how dense its lines. ``python tests/shape.py DIRECTORY...``

A line is code if it is neither blank, nor a comment, nor part of a docstring. Many short files of dense lines are no
small package: the nodes of expressions on a line tell.
"""

from __future__ import annotations

import ast
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Shape:
    """Counts over files."""

    name: str
    lines: list[int] = field(default_factory=list)  # of each file
    code: int = 0
    comments: int = 0
    nodes: int = 0  # of expressions
    conditionals: int = 0  # ``a if b else c``

    def add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines()]
        docstrings = 0
        for node in ast.walk(ast.parse(text)):
            self.nodes += isinstance(node, ast.expr)
            self.conditionals += isinstance(node, ast.IfExp)
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docstrings += (node.end_lineno or node.lineno) - node.lineno + 1
        self.lines.append(len(lines))
        self.comments += sum(line.startswith("#") for line in lines)
        self.code += sum(1 for line in lines if line and not line.startswith("#")) - docstrings

    def row(self) -> str:
        code = max(1, self.code)
        median, largest = statistics.median(self.lines), max(self.lines)
        return (
            f"{self.name:<36}{len(self.lines):>6}{sum(self.lines):>8}{median:>8.0f}{largest:>9}{self.code:>7}"
            f"{self.nodes / code:>9.2f}{1000 * self.conditionals / code:>14.0f}{self.comments / sum(self.lines):>10.1%}"
        )


def main(directories: list[str]) -> None:
    columns = f"{'files':>6}{'lines':>8}{'median':>8}{'largest':>9}{'code':>7}{'nodes/l':>9}"
    print(f"{'':<36}{columns}{'a if b/1000':>14}{'comments':>10}")
    for root in map(Path, directories):
        rooms = {str(root): Shape(str(root))}
        for path in sorted(root.rglob("*.py")):
            room = str(path.parent)
            rooms.setdefault(room, Shape(room)).add(path)
            if room != str(root):
                rooms[str(root)].add(path)
        for shape in rooms.values():
            if shape.lines:
                print(shape.row())


if __name__ == "__main__":
    main(sys.argv[1:])
