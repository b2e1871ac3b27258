"""The package's source as syntax trees, which several tests look through: parsed once a session."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "lightning_smddp"


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """What ``ast.walk`` yields for the whole file."""
    return list(ast.walk(parse(path)))


def dotted(node: ast.AST) -> str:
    """``a.b().c[].d`` of such an expression: names alone, and ``?`` where none begins."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{dotted(node.value)}[]"
    if isinstance(node, ast.Name):
        return node.id
    return "?"
