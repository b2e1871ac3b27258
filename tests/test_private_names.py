"""Every private name of torch, Lightning or DeepSpeed that the package uses is in the design's table, with its end."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import lightning_smddp
import lightning_smddp.strategies.lightning  # here, as torch sets environment variables
from tests.sources import PACKAGE, dotted, nodes, source_files

HEADING = "## Private parts of torch and Lightning"
DESIGN = PACKAGE.parent / "docs" / "design.md"
STRATEGIES = (
    "SMDDPStrategy", "PipelineStrategy", "SMDDPFSDPStrategy", "SMDDPDeepSpeedStrategy", "SMDDPFabricStrategy",
    "SMDDPFabricFSDPStrategy",
)  # fmt: skip
PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def rows() -> list[str]:
    """The first column of the table."""
    section = DESIGN.read_text().split(f"\n{HEADING}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.split(" | ", 1)[0] for line in lines[1:]]


def in_compat(path: Path) -> Iterator[str]:
    """Private names of other objects than a file's own, as attributes, in strings, and imported."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and dotted(node.value) not in ("self", "cls", "ours", "record"):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(PACKAGE.name):
            yield from (alias.name for alias in node.names)


def of_lightnings_classes() -> set[str]:
    """Private methods and attributes of the classes that the strategies inherit from."""
    found: set[str] = set()
    for name in STRATEGIES:
        for cls in getattr(lightning_smddp, name).__mro__:
            if cls is not object and not cls.__module__.startswith(PACKAGE.name):
                found |= set(vars(cls)) | set(re.findall(r"self\.(_\w+)", inspect.getsource(cls)))
    return found


def inherited(path: Path, upstream: set[str]) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and node.attr in upstream:
            if dotted(node.value) in ("self", "super()", "strategy", "self.strategy"):
                yield node.attr
        elif isinstance(node, ast.FunctionDef) and node.name in upstream:
            yield node.name


def private_names() -> set[str]:
    upstream = of_lightnings_classes()
    found: set[str] = set()
    for path in source_files():
        if path.parent.name == "_compat":
            found |= set(in_compat(path))
        if path.parent.name in ("strategies", "_compat"):
            found |= set(inherited(path, upstream))
    return {name for name in found if PRIVATE.fullmatch(name)}


def test_each_is_in_the_table_of_the_design() -> None:
    listed = {name for row in rows() for name in re.findall(r"`(_\w+)`", row)}
    assert private_names() == listed


def test_the_table_is_short() -> None:
    assert len(rows()) <= 25
