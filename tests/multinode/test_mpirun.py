"""Open MPI's mpirun over two nodes, as it starts its daemon there by ssh, but without an ssh server."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multinode import job
from tests.multinode.namespaces import Machines, machines

MPIRUN = shutil.which("mpirun")


def open_mpi_is_missing() -> bool:
    if MPIRUN is None:
        return True
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return "Open MPI" not in version


pytestmark = [
    pytest.mark.multinode,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(open_mpi_is_missing(), reason="Open MPI's mpirun is not installed (Debian: openmpi-bin)"),
]


def write_agent(there: Machines) -> Path:
    """What mpirun runs in place of ssh: ``AGENT HOST COMMAND...``."""
    cases = "\n".join(f'  {name}) exec {shlex.join(there.command(name, "sh", "-c"))} "$*";;' for name in there.names)
    agent = there.where / "agent"
    agent.write_text(f'#!/bin/sh\nhost="$1"\nshift\ncase "$host" in\n{cases}\nesac\n')
    agent.chmod(0o755)
    return agent


MORE = pytest.mark.exhaustive
CASES = [pytest.param(1, ()), pytest.param(2, (), marks=MORE), pytest.param(2, ("--map-by", "node"), marks=MORE)]


@pytest.mark.parametrize(("ranks", "mapping"), CASES)
def test_two_nodes(ranks: int, mapping: tuple[str, ...], tmp_path: Path) -> None:
    with machines(["host0", "host1"], tmp_path) as there:
        hosts = ["--host", f"host0:{ranks},host1:{ranks}", "-np", str(2 * ranks), *mapping]
        options = ["-mca", "plm_rsh_agent", str(write_agent(there)), "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
        options += ["-x", "MASTER_ADDR=10.77.0.1"]
        program = [sys.executable, "-m", "tests.multinode.job", str(tmp_path), str(ranks), "2"]
        words = [str(MPIRUN), "--allow-run-as-root", *options, *hosts, *program]
        result = there.run("host0", words, {"TMPDIR": "/tmp"})
    assert result.returncode == 0, result.stdout
    job.check(tmp_path, ranks, 2, "mpirun", result.stdout, by_node=bool(mapping))
    assert result.stdout.count("rank 0 at 10.77.0.1 port") == 1, result.stdout
