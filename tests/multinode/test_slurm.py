"""Slurm with two nodes, each with a daemon of its own: ``sbatch`` with ``srun`` in it, and without."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.multinode import job
from tests.multinode.namespaces import Machines, machines

NEEDED = [shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/bin") for name in ("slurmctld", "slurmd", "sbatch")]
pytestmark = [
    pytest.mark.multinode,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(None in NEEDED, reason="Slurm is not installed (Debian: slurm-wlm)"),
]
LIMIT_S = 60.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost=node0
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={where}/state
SlurmdSpoolDir={where}/spool-%n
SlurmctldPidFile={where}/slurmctld.pid
SlurmdPidFile={where}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
NodeName=node[0-1] CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""
# slurmd asks for the control groups of systemd, though nothing uses them here.
GROUPS = "/sys/fs/cgroup"
CONTROL_GROUPS = (
    f"mount -t tmpfs none {GROUPS} && mkdir {GROUPS}/systemd && "
    f"mount -t cgroup -o none,name=lightning_smddp {GROUPS} {GROUPS}/systemd"
)
BATCH = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node={ranks} --output={name}.log
{program}
touch {name}.done
"""


@contextmanager
def cluster(where: Path) -> Iterator[Machines]:
    """Two machines with Slurm; skips the test if its daemons cannot run here."""
    (where / "slurm.conf").write_text(CONFIGURATION.format(where=where))
    for name in ("state", "spool-node0", "spool-node1"):
        (where / name).mkdir()
    daemons = {"controller": ("node0", "slurmctld"), "first": ("node0", "slurmd"), "second": ("node1", "slurmd")}
    with machines(["node0", "node1"], where) as there:
        started = []
        try:
            for name, (node, daemon) in daemons.items():
                with (where / f"{name}.out").open("w") as file:
                    command = there.command(node, daemon, "-D", prepare=CONTROL_GROUPS)
                    environment = there.environment({"SLURM_CONF": str(where / "slurm.conf")})
                    started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=where))
            _wait(there, started)
            yield there
        finally:
            for process in started:
                process.kill()
                process.wait()


def _wait(there: Machines, daemons: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and all(daemon.poll() is None for daemon in daemons):
        states = slurm(there, "sinfo", "--noheader", "--format=%D %t")
        if states.split() == ["2", "idle"]:
            return
        time.sleep(0.1)
    said = "\n".join(path.read_text()[-500:] for path in sorted(there.where.glob("*.out")))
    pytest.skip(f"Slurm's daemons do not run here: {said}")


def slurm(there: Machines, *words: str) -> str:
    """What a command of Slurm prints."""
    return there.run("node0", words, {"SLURM_CONF": str(there.where / "slurm.conf")}).stdout


def batch(there: Machines, name: str, program: str, ranks: int) -> str:
    """Run a job of two nodes with ``ranks`` tasks each to its end; returns its output."""
    (there.where / f"{name}.sh").write_text(BATCH.format(name=name, program=program, ranks=ranks))
    said = slurm(there, "sbatch", "--chdir", str(there.where), f"{name}.sh")
    deadline = time.monotonic() + LIMIT_S
    while not (there.where / f"{name}.done").exists() and time.monotonic() < deadline:
        time.sleep(0.1)  # sbatch --wait looks every 10 seconds only
    log = there.where / f"{name}.log"
    return log.read_text() if log.exists() else said


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_batch_job_of_two_nodes(ranks: int, tmp_path: Path) -> None:
    program = f"-m tests.multinode.job {tmp_path} {ranks} 2"
    check = f"from lightning_smddp.launchers.detection import detect; detect().check({ranks}, 2)"
    with cluster(tmp_path) as there:
        output = batch(there, "with", f"srun {sys.executable} {program}", ranks)
        alone = batch(there, "without", f'{sys.executable} -c "{check}"', ranks)
    job.check(tmp_path, ranks, 2, "srun", output)
    assert "Started by srun: rank 0" in output, output
    assert "Write srun before python" in alone, alone
