"""The house rules that can be read off the package's source: layers, private names, sizes."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import PACKAGE, dotted, nodes, parse, source_files

LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
UPSTREAM = {"torch"} | LIGHTNING
ROOMS_ABOVE = ("strategies", "bridge", "choice", "resume", "_compat.trainer")  # they know Lightning
HIGHER = tuple(f"lightning_smddp.{room}" for room in ROOMS_ABOVE)
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each absolute import, as ``module`` or ``module.name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def root(name: str) -> str:
    return name.partition(".")[0]


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def upstream_aliases(file: Iterable[ast.AST]) -> dict[str, str]:
    """Local name -> upstream name it stands for, over all imports of a file, given by its nodes."""
    aliases = {}
    for node in file:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or root(alias.name)
                aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {local: name for local, name in aliases.items() if root(name) in UPSTREAM}


def private_upstream_names(tree: ast.AST, file: list[ast.AST]) -> list[tuple[int, str]]:
    """Private names of torch or Lightning that a file imports or reaches as ``module._name``; ``file``: its nodes."""
    found = [(line, name) for line, name in imported_names(tree) if root(name) in UPSTREAM and is_private(name)]
    aliases = upstream_aliases(file)
    for node in file:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = dotted(node.value)
            if root(base) in aliases:
                found.append((node.lineno, f"{base}.{node.attr}"))
    return found


def describe(path: Path, found: list[tuple[int, str]]) -> list[str]:
    return [f"{path.relative_to(PACKAGE.parent)}:{line} {name}" for line, name in found]


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [
        ("checkpoint", LIGHTNING),
        ("communication", LIGHTNING),
        ("launchers", UPSTREAM | {"numpy"}),
        ("pipeline", LIGHTNING),
        ("sagemaker", UPSTREAM),
        ("supervision", LIGHTNING),
        ("planner", UPSTREAM | {"numpy", "torchmetrics"}),
        ("pytree.py", LIGHTNING),
        ("sharding", LIGHTNING),
    ],
)
def test_lower_layers_import_no_higher_ones(layer: str, forbidden: set[str]) -> None:
    offenders = []
    for path in sorted((PACKAGE / layer).rglob("*.py")) or [PACKAGE / layer]:
        imports = list(imported_names(parse(path)))
        offenders += describe(path, [(line, name) for line, name in imports if root(name) in forbidden])
        offenders += describe(path, [(line, name) for line, name in imports if name.startswith(HIGHER)])
    assert offenders == []


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports_within(package: dict[str, ast.Module]) -> dict[str, set[str]]:
    """For each module of ``package`` those of it that it imports: also in functions, and for type checkers alone."""
    graph = {}
    for module, tree in package.items():
        named = {name for _, name in imported_names(tree)}
        found = {name if name in package else name.rpartition(".")[0] for name in named}
        graph[module] = (found & package.keys()) - {module}
    return graph


# Imports that make no circle of ideas: the package's own page loads what it names when somebody asks for it, and the
# parts that a strategy holds know the type of their owner.
LAZY = "lightning_smddp"
OWNER = "lightning_smddp.strategies.base"
PARTS = {
    f"lightning_smddp.strategies.{part}" for part in ("run_supervision", "sagemaker_job", "sanity_checks", "saving")
}


def test_no_modules_import_each_other() -> None:
    graph = imports_within({module_name(path): parse(path) for path in source_files()})
    del graph[LAZY]
    for module, imported in graph.items():
        imported.discard(LAZY)
        if module in PARTS:
            imported.discard(OWNER)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names a circle


def test_what_pipelines_are_compared_with_has_nothing_of_theirs() -> None:
    """Else a defect of theirs would hide in both."""
    graph = imports_within({module_name(path): parse(path) for path in source_files()})
    graph[LAZY] = set()
    used, remaining = set[str](), ["lightning_smddp.strategies.accumulation"]
    while remaining:
        used.add(remaining.pop())
        remaining = [name for module in used for name in graph[module] - used]
    assert "lightning_smddp.seeding" in used
    assert [name for name in used if name.startswith(("lightning_smddp.pipeline", "lightning_smddp.bridge"))] == []


def test_private_upstream_names_appear_in_compat_only() -> None:
    offenders = []
    for path in source_files():
        if path.parent.name != "_compat":
            offenders += describe(path, private_upstream_names(parse(path), nodes(path)))
    assert offenders == []


def test_files_and_functions_are_small() -> None:
    offenders = []
    for path in source_files():
        lines = path.read_text().count("\n")
        if lines > MAX_FILE_LINES:
            offenders += describe(path, [(1, f"{lines} lines in the file")])
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    offenders += describe(path, [(node.lineno, f"{node.name} has {length} lines")])
    assert offenders == []


# Words of the house for what the field has words for.
RETIRED = set(
    """
    Ghost Splitting StageCuts Division DividedModule StagedModule Grid Variants Program Rebind Template Memories
    StageGraph ShownStates Tie Collective Exchange Meeting Session Card Door Ending GradientWindow Item Resources
    asks_for_place build_program course_of departures left_behind ghost ghosts gather_full is_told materialize
    natural_bytes obstacle obstacle_to obstacles own_seeds probe_plan rebind rebinds rehearsal_plan row_ways same_batch
    seals shown_whole speaks_for set_aside splitting survey untouched user_place whole_again
    """.split()  # noqa: SIM905
)


def names_in(node: ast.AST) -> list[str]:
    """The names that a node of the syntax tree itself gives or uses."""
    found = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
    return [name for name in found if isinstance(name, str)]


def test_names_are_the_words_of_the_field() -> None:
    offenders = []
    for path in source_files():
        for node in nodes(path):
            offenders += describe(path, [(node.lineno, name) for name in names_in(node) if name in RETIRED])
    assert offenders == []


def test_names_in_docstrings_and_comments_exist() -> None:
    """``Class.member``, and what roles such as ``:meth:`` name."""
    known = {name for path in source_files() for node in nodes(path) for name in [path.stem, *names_in(node)]}
    text = re.compile(r"`([A-Z]+[a-z]\w*\.\w+)|:(?:class|func|meth|data):`~?([\w.]+)`")
    offenders = []
    for path in source_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            named = [member or role for member, role in text.findall(line)]
            missing = [name for name in named if not known.issuperset(name.lstrip(".").split(".")[-2:])]
            offenders += describe(path, [(number, name) for name in missing])
    assert offenders == []


def methods_of_class(path: Path, name: str) -> set[str]:
    (found,) = [node for node in nodes(path) if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("file", "name"),
    [("ddp.py", "DataParallel"), ("pipeline.py", "PipelineParallel"), ("fsdp.py", "FullyShardedParallel")],
    ids=str,
)
def test_hooks_of_lightning_are_defined_once(file: str, name: str) -> None:
    """What the strategies do in a hook stands in the base class; the strategies fill in methods of our own."""
    common = methods_of_class(PACKAGE / "strategies" / "base.py", "TrainerStrategy")
    own = methods_of_class(PACKAGE / "strategies" / file, name)
    ours = {method for method in own if method.startswith("_")}
    assert "save_checkpoint" in common
    assert common & own - ours == set()


# ---- the rules find what they look for ----

OFFENDER = """
import torch, torch.distributed as dist
from torch._dynamo import x
from lightning.pytorch.utilities import rank_zero_only, _hidden
from ._compat import _ours
if TYPE_CHECKING:
    import lightning.pytorch
def f():
    import lightning.fabric
    return dist._hidden(), torch.distributed._c10d, torch.__version__, self._own, torch.empty(1)._base
"""


def test_circles_are_seen_behind_functions_and_type_checking() -> None:
    package = {
        "p.a": "from p import b",
        "p.b": "def f():\n    from p.c import g",
        "p.c": "if TYPE_CHECKING:\n    from p.a import f",
        "p.d": "import p.a",
    }
    with pytest.raises(graphlib.CycleError, match=r"'p\.a'.*'p\.b'|'p\.b'.*'p\.c'"):
        graphlib.TopologicalSorter(imports_within({name: ast.parse(text) for name, text in package.items()})).prepare()


def test_the_rules_see_an_offender() -> None:
    tree = ast.parse(OFFENDER)
    assert sorted(private_upstream_names(tree, list(ast.walk(tree)))) == [
        (3, "torch._dynamo.x"),
        (4, "lightning.pytorch.utilities._hidden"),
        (10, "dist._hidden"),
        (10, "torch.distributed._c10d"),
        (10, "torch.empty()._base"),
    ]
