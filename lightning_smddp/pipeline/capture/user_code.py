"""The user's code that runs now: where it is, and whether it decides by a value that it reads, or just uses it."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from types import FrameType

_NO_USERS = ("torch.", "lightning_smddp.", "contextlib")  # files whose code is not the user's
_OURS = ("lightning_smddp.", "contextlib", "torch._tensor", "torch.overrides", "torch.functional", "torch.utils._")


def user_location() -> str:
    """``file:line`` of the innermost code that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch" and not name.startswith(_NO_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def decides() -> bool:
    """Whether the code that is reading a value now may take another path by it.

    A check does not count: where it fails it raises, in one process as on the rank that reads. Without source, it may.
    """
    # From here up through our own code and torch's methods of tensors (`__bool__`, `item`) to who called these.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return True
    return _decides(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(maxsize=64)
def _tree(filename: str) -> ast.AST:
    source = "".join(linecache.getlines(filename))
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


@functools.lru_cache(maxsize=1024)
def _decides(filename: str, line: int) -> bool:
    # All nodes of the file's syntax tree that the line is in: the module's, the functions', the statement's, its
    # parts'.
    tree = _tree(filename)
    around = [node for node in ast.walk(tree) if _has(node, line)]
    statements = [node for node in around if isinstance(node, ast.stmt)]
    if not statements:
        return True
    statement = max(statements, key=lambda node: node.lineno)  # the innermost
    if isinstance(statement, ast.Assert) or _is_check(statement):
        return False
    if isinstance(statement, (ast.If, ast.While, ast.Match)):
        return True
    for node in ast.walk(statement):
        if isinstance(node, (ast.IfExp, ast.BoolOp, ast.comprehension)):
            return True
    # The value is only given a name here. Whether it decides is seen by whether the function tests that name anywhere.
    functions = [node for node in around if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    innermost = max(functions, key=lambda node: node.lineno, default=tree)
    return _is_tested(_assigned(statement), innermost)


def _has(node: ast.AST, line: int) -> bool:
    first = getattr(node, "lineno", None)
    last = getattr(node, "end_lineno", None)
    if first is None or last is None:
        return False
    return bool(first <= line <= last)


def _is_check(node: ast.AST) -> bool:
    """Whether a statement only guards: an ``if`` whose body ends in ``raise`` decides nothing that a step computes."""
    if not isinstance(node, ast.If):
        return False
    return isinstance(node.body[-1], ast.Raise)


def _assigned(statement: ast.stmt) -> set[str]:
    """What ``statement`` gives a value, as source: names and attributes."""
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(ast.unparse(node))
    return names


def _is_tested(names: set[str], within: ast.AST) -> bool:
    """Whether code in ``within`` decides by one of ``names``."""
    for node in ast.walk(within):
        if not isinstance(node, (ast.If, ast.While, ast.IfExp)):
            continue
        if _is_check(node):
            continue
        used = {ast.unparse(part) for part in ast.walk(node.test) if isinstance(part, ast.expr)}
        if names & used:
            return True
    return False
