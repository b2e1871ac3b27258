"""Who started this process: :func:`detect`. The order below is documented in ``docs/launchers.md``."""

from __future__ import annotations

import os
from collections.abc import Callable

from lightning_smddp.launchers import mpi, sagemaker
from lightning_smddp.launchers.launch import Environ, Launch, Launcher, Notes

_JSRUN = {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"}  # Lightning's rule
_PYTORCH_JOB = {"KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def detect(environ: Environ = os.environ) -> Launch:
    """Who started this process, and as which rank. Reads ``environ`` and SageMaker's files, and nothing else.

    The first of these whose variables are there: torchrun, jsrun (LSF), Open MPI's mpirun, the mpirun of MPICH and of
    Intel MPI, srun (Slurm), a Kubeflow PyTorchJob; else nobody. Inner launchers come before those that they can run
    in: torchrun runs in jobs of all others, mpirun in jobs of Slurm, and jsrun sets Open MPI's variables too.

    Args:
        environ: the environment of the process.

    Raises:
        ValueError: a variable or file has a value that makes no sense; the message names it.
    """
    # What was given first, then the launcher's own words, then the place's, then what can be worked out from both.
    notes = Notes(environ)
    notes.put("main_address", environ.get("MASTER_ADDR") or None)
    notes.numbers(main_port="MASTER_PORT")
    job = sagemaker.read_job(environ)
    launcher, _, read = next(row for row in _ORDER if row[1](environ))
    read(notes)
    if job is not None:
        sagemaker.add(notes, launcher, job)
    if launcher == "mpirun":
        mpi.read_meeting_place(notes)
    return Launch(launcher, problems=tuple(notes.problems), **notes.values)


def _by_pytorch_job(environ: Environ) -> bool:
    """One process a pod. With LOCAL_RANK or NODE_RANK someone has made other plans."""
    planned = "LOCAL_RANK" in environ or "NODE_RANK" in environ
    return environ.keys() >= _PYTORCH_JOB and not planned and environ["WORLD_SIZE"] != "1"


def _read_torchrun(notes: Notes) -> None:
    notes.numbers(rank="RANK", local_rank="LOCAL_RANK", world_size="WORLD_SIZE", local_world_size="LOCAL_WORLD_SIZE")
    notes.numbers(node_rank="GROUP_RANK", num_nodes="GROUP_WORLD_SIZE")


def _read_jsrun(notes: Notes) -> None:
    notes.numbers(rank="JSM_NAMESPACE_RANK", local_rank="JSM_NAMESPACE_LOCAL_RANK", world_size="JSM_NAMESPACE_SIZE")


def _read_pytorch_job(notes: Notes) -> None:
    notes.numbers(rank="RANK", world_size="WORLD_SIZE", node_rank="RANK", num_nodes="WORLD_SIZE")
    notes.put("local_rank", 0)
    notes.put("local_world_size", 1)


def _read_nobody(notes: Notes) -> None:
    """What a user, or Lightning for the processes that it starts, has set."""
    notes.numbers(local_rank="LOCAL_RANK", node_rank="NODE_RANK")
    notes.numbers(node_rank="GROUP_RANK")


# Of each launcher by what it is known, and what reads its variables. The first one that is known counts.
_ORDER: tuple[tuple[Launcher, Callable[[Environ], bool], Callable[[Notes], None]], ...] = (
    ("torchrun", lambda environ: "TORCHELASTIC_RUN_ID" in environ, _read_torchrun),
    ("jsrun", lambda environ: environ.keys() >= _JSRUN, _read_jsrun),
    ("mpirun", mpi.started_by_mpirun, mpi.read_mpirun),
    ("srun", mpi.started_by_srun, mpi.read_srun),
    ("kubeflow", _by_pytorch_job, _read_pytorch_job),
    ("lightning", lambda environ: True, _read_nobody),
)
