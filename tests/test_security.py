"""What SECURITY.md promises and the source can show: no file unpickled, no shell, private shared memory."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_smddp.communication.communicator import Communicator, reduce_once
from tests.ranks import run_each, run_ranks
from tests.sources import PACKAGE, dotted, nodes, source_files

UNPICKLING = {"pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "dill.loads", "cloudpickle.loads"}
SHELL = {"os.system", "os.popen", "eval", "exec"}
# file -> what it may do: with the user's explicit word only
ALLOWED = {
    "communication/objects.py": {"pickle.loads"},  # from ranks of the same job
    "checkpoint/files.py": {"torch.load without weights_only=True"},  # hands on the user's own weights_only=False
}


def argument(call: ast.Call, name: str) -> str | None:
    """What stands behind ``name=`` in a call, if that is there."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return ast.unparse(keyword.value)
    return None


def dangers(file: Iterable[ast.AST]) -> list[tuple[int, str]]:
    """(line, what) of each call that could run code out of data, in a file given by its nodes.

    Object collectives are not among them: ranks of a job trust each other.
    """
    found = []
    for node in file:
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "dill"):
            found.append((node.lineno, f"from {node.module} import ..."))
        if isinstance(node, ast.Call):
            found += [(node.lineno, what) for what in dangers_of(node)]
    return found


def dangers_of(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    if name in UNPICKLING | SHELL:
        yield name
    if name == "torch.load" and argument(call, "weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and argument(call, "allow_pickle") not in (None, "False"):
        yield f"{name} with allow_pickle"
    if argument(call, "shell") not in (None, "False"):
        yield f"{name} with a shell"


def test_the_package_runs_no_code_out_of_data() -> None:
    offenders = []
    for path in source_files():
        name = str(path.relative_to(PACKAGE))
        for line, what in dangers(nodes(path)):
            if what not in ALLOWED.get(name, set()):
                offenders.append(f"{name}:{line} {what}")
    assert offenders == []


def test_the_rule_sees_offenders() -> None:
    source = """
pickle.loads(x); torch.load(f); torch.load(f, weights_only=False); torch.load(f, weights_only=True)
subprocess.run("x", shell=True); eval("1"); np.load(f, allow_pickle=True)
from pickle import loads
"""
    assert len(dangers(ast.walk(ast.parse(source)))) == 7


# ---- shared memory ----


def segments() -> list[tuple[str, int, bool]]:
    """Name, permissions, and whether anyone could still open it, of each shared-memory file that is open here."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target, status = os.readlink(entry), os.stat(entry)
        except OSError:
            continue
        if target.startswith(("/dev/shm/", "/memfd:")):
            found.append((target, stat.S_IMODE(status.st_mode), status.st_nlink > 0))
    return found


def reduce_and_look(zero_copy: bool) -> list[tuple[str, int, bool]]:
    group = dist.group.WORLD
    communicator = Communicator(group, torch.device("cpu"), timedelta(seconds=20), gradient_bytes=1 << 20)
    communicator.zero_copy = zero_copy
    algorithm = communicator.algorithm("shared_memory")
    total = reduce_once(algorithm, torch.ones(1000), slot=0)
    assert bool((total == 1).all())
    found = segments()
    dist.barrier()
    algorithm.close()
    communicator.close()
    return found


def test_segments_have_no_name_that_others_can_open() -> None:
    """A file of torch's is 0600, and unlinked before a peer is sent its descriptor; ours never have a name."""
    for of_rank in run_ranks(run_each, 2, reduce_and_look, [(True,), (False,)]):
        assert all(of_rank)
        for name, mode, linked in (segment for found in of_rank for segment in found):
            assert not linked, name
            assert name.startswith("/memfd:") or mode == 0o600
