"""Who started this process: :func:`detect`. The order below is documented in ``docs/launchers.md``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lightning_smddp.launchers import mpi, sagemaker
from lightning_smddp.launchers.launch import Environ, Launch, Launcher, Notes

_Read = Callable[[Notes], str]
_JSRUN = {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"}  # Lightning's rule
_PYTORCH_JOB = {"KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def detect(environ: Environ = os.environ, base_dir: str | Path | None = None) -> Launch:
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
    # The launcher's own words first, then the place's, then what can be worked out from both.
    notes = Notes(environ)
    job = sagemaker.read_job(environ, base_dir)
    launcher, read = _started_by(environ)
    product = read(notes)
    if job is not None:
        sagemaker.add(notes, launcher, job)
    if launcher == "mpirun":
        mpi.read_meeting_place(notes)
        _compare_ranks(notes)
    return notes.launch(launcher, product)


def _started_by(environ: Environ) -> tuple[Launcher, _Read]:
    for launcher, has_started, read in _ORDER:
        if has_started(environ):
            return launcher, read
    return "lightning", _read_nobody


def _by_torchrun(environ: Environ) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ


def _by_jsrun(environ: Environ) -> bool:
    return environ.keys() >= _JSRUN


def _by_pytorch_job(environ: Environ) -> bool:
    """One process a pod. With LOCAL_RANK or NODE_RANK someone has made other plans."""
    if not environ.keys() >= _PYTORCH_JOB:
        return False
    if "LOCAL_RANK" in environ or "NODE_RANK" in environ:
        return False
    return environ["WORLD_SIZE"] != "1"


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
    if "LOCAL_RANK" not in notes.environ:  # they may mean something else than this process
        return
    for name in ("rank", "world_size"):
        variable = name.upper()
        other = notes.environ.get(variable)
        if other is None or other == str(notes[name]):
            continue
        words = name.replace("_", " ")
        source = notes.sources[name]
        notes.problem(
            f"mpirun says {words} {notes[name]} ({source}), but {variable}={other}.",
            f"Unset {variable}, or let it be what mpirun says.",
        )


# Of each launcher by what it is known, and what reads its variables and returns the product's name. The first one that
# is known counts, for the reasons in :func:`detect`.
_ORDER: tuple[tuple[Launcher, Callable[[Environ], bool], _Read], ...] = (
    ("torchrun", _by_torchrun, _read_torchrun),
    ("jsrun", _by_jsrun, _read_jsrun),
    ("mpirun", mpi.started_by_mpirun, mpi.read_mpirun),
    ("srun", mpi.started_by_srun, mpi.read_srun),
    ("kubeflow", _by_pytorch_job, _read_pytorch_job),
)
