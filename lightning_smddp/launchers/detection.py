"""Who started this process: :func:`detect`. The order below is documented in ``docs/launchers.md``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_smddp.launchers import mpi, sagemaker
from lightning_smddp.launchers.launch import Launch, Launcher, Notes

_JSRUN = {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"}  # Lightning's rule
_PYTORCH_JOB = {"KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def detect(environ: Mapping[str, str] = os.environ, base_dir: str | Path | None = None) -> Launch:
    """Who started this process, and as which rank. Reads ``environ`` and SageMaker's files, and nothing else.

    The first of these whose variables are there: torchrun, jsrun (LSF), Open MPI's mpirun, the mpirun of MPICH and of
    Intel MPI, srun (Slurm), a Kubeflow PyTorchJob; else nobody. Inner launchers come before those that they can run
    in: torchrun runs in jobs of all others, mpirun in jobs of Slurm, and jsrun sets Open MPI's variables too.

    Args:
        environ: the environment of the process.
        base_dir: SageMaker's ``/opt/ml``; None is ``SAGEMAKER_BASE_DIR``, or that.

    Raises:
        ValueError: a variable or file has a value that makes no sense; the message names it.
    """
    notes = Notes(environ)
    job = sagemaker.read_job(environ, base_dir)
    launcher, read = next((name, read) for name, started, read in _ORDER if started(environ))
    product = read(notes)
    if job is not None:
        sagemaker.add(notes, launcher, job)
    if launcher == "mpirun":
        mpi.read_meeting_place(notes)
        _compare_ranks(notes)
    return notes.launch(launcher, product)


def _by_torchrun(environ: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ


def _by_jsrun(environ: Mapping[str, str]) -> bool:
    return environ.keys() >= _JSRUN


def _by_pytorch_job(environ: Mapping[str, str]) -> bool:
    """One process a pod. With LOCAL_RANK or NODE_RANK someone has made other plans."""
    others = {"LOCAL_RANK", "NODE_RANK"} & environ.keys()
    return environ.keys() >= _PYTORCH_JOB and not others and environ["WORLD_SIZE"] != "1"


def _by_nobody(environ: Mapping[str, str]) -> bool:
    return True


def _read_torchrun(notes: Notes) -> str:
    for name in ("rank", "local_rank", "world_size", "local_world_size"):
        notes.number(name, name.upper())
    notes.number("node_rank", "GROUP_RANK")
    notes.number("num_nodes", "GROUP_WORLD_SIZE")
    _read_master(notes)
    return ""


def _read_jsrun(notes: Notes) -> str:
    notes.number("rank", "JSM_NAMESPACE_RANK")
    notes.number("local_rank", "JSM_NAMESPACE_LOCAL_RANK")
    notes.number("world_size", "JSM_NAMESPACE_SIZE")
    _read_master(notes)
    return "LSF"


def _read_pytorch_job(notes: Notes) -> str:
    notes.number("rank", "RANK")
    notes.number("world_size", "WORLD_SIZE")
    notes.number("node_rank", "RANK")
    notes.number("num_nodes", "WORLD_SIZE")
    notes.put("local_rank", 0, "one process a pod")
    notes.put("local_world_size", 1, "one process a pod")
    _read_master(notes)
    return "PyTorchJob"


def _read_nobody(notes: Notes) -> str:
    """What a user, or Lightning for the processes that it starts, has set."""
    notes.number("local_rank", "LOCAL_RANK")
    notes.number("node_rank", "NODE_RANK", "GROUP_RANK")
    _read_master(notes)
    return ""


def _read_master(notes: Notes) -> None:
    notes.text("main_address", "MASTER_ADDR")
    notes.number("main_port", "MASTER_PORT")


def _compare_ranks(notes: Notes) -> None:
    """``smddprun`` and scripts that copy mpirun's variables set torch's names too; they have to mean the same."""
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        other = notes.environ.get(variable)
        copied = "LOCAL_RANK" in notes.environ  # else it may mean something else than this process
        if copied and other is not None and other != str(notes[name]):
            notes.problem(
                f"mpirun says {name.replace('_', ' ')} {notes[name]} ({notes.sources[name]}), but {variable}={other}.",
                f"Unset {variable}, or let it be what mpirun says.",
            )


_ORDER: tuple[tuple[Launcher, Callable[[Mapping[str, str]], bool], Callable[[Notes], str]], ...] = (
    ("torchrun", _by_torchrun, _read_torchrun),
    ("jsrun", _by_jsrun, _read_jsrun),
    ("mpirun", mpi.started_by_mpirun, mpi.read_mpirun),
    ("srun", mpi.started_by_srun, mpi.read_srun),
    ("kubeflow", _by_pytorch_job, _read_pytorch_job),
    ("lightning", _by_nobody, _read_nobody),
)
