"""What ``srun`` and ``mpirun`` (Open MPI, MPICH, Intel MPI) say to the processes that they start, by variables alone.

Of Slurm these are Lightning's rules, and what they overlook.
"""

from __future__ import annotations

import re
import zlib

from lightning_smddp.launchers.launch import Environ, Notes

DEFAULT_PORT = 29500  # torch's
_FIRST_PORT = 15000
_PORTS = 10000  # as many as that: below the range from which Linux takes ports by itself
# The same on all nodes of a job, and another one in each job.
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def started_by_srun(environ: Environ) -> bool:
    """Whether this is a task of a Slurm job: Lightning's rule, and a task number, which a shell of salloc has not."""
    return _in_slurm_job(environ) and "SLURM_PROCID" in environ


def in_allocation_only(environ: Environ) -> bool:
    """Whether Lightning would take a shell of an allocation for a task, and then miss the task's number."""
    return _in_slurm_job(environ) and "SLURM_PROCID" not in environ


def _in_slurm_job(environ: Environ) -> bool:
    """Whether Lightning's ``SLURMEnvironment`` would detect a job of Slurm."""
    return "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def read_srun(notes: Notes) -> None:
    """Note rank, world size and addresses from the variables that ``srun`` sets for each task."""
    environ = notes.environ
    notes.numbers(rank="SLURM_PROCID", local_rank="SLURM_LOCALID", node_rank="SLURM_NODEID")
    notes.numbers(world_size="SLURM_NTASKS", local_world_size="SLURM_NTASKS_PER_NODE", num_nodes="SLURM_NNODES")
    nodes = environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes:
        notes.put("main_address", first_host(nodes))
    # The port is that of Lightning's `SLURMEnvironment`.
    job = environ.get("SLURM_JOB_ID", "")
    if job.isdecimal():
        notes.put("main_port", 15000 + int(job[-4:]))
    is_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    if notes["world_size"] > 1 and not is_step:
        notes.problems.append(
            f"This Slurm job has SLURM_NTASKS={notes['world_size']} tasks, but this process was not started by srun, "
            "so it would wait for the others for ever. Write srun before python in the batch script.",
        )


def first_host(nodes: str) -> str:
    """The first name of Slurm's list of nodes: ``"gpu[03-05,09],cpu1"`` gives ``"gpu03"``."""
    # Each pair of brackets becomes the first number in it.
    return re.split("[ ,]", re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes.strip()))[0]


def started_by_open_mpi(environ: Environ) -> bool:
    """Whether Open MPI's ``mpirun`` (``mpiexec``, ``prterun``) started this process. Its variables are documented."""
    return "OMPI_COMM_WORLD_RANK" in environ and "OMPI_COMM_WORLD_SIZE" in environ


def started_by_mpirun(environ: Environ) -> bool:
    """Whether an ``mpirun`` did, Open MPI's or Hydra, which is that of MPICH and of Intel MPI.

    Slurm's ``srun --mpi=pmi2`` sets ``PMI_RANK`` too, but no local rank.
    """
    return started_by_open_mpi(environ) or {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"} <= environ.keys()


def read_mpirun(notes: Notes) -> None:
    """Note ranks, the number of nodes, and which one this is (``OMPI_COMM_WORLD_NODE_RANK`` is not that)."""
    if started_by_open_mpi(notes.environ):
        notes.numbers(rank="OMPI_COMM_WORLD_RANK", local_rank="OMPI_COMM_WORLD_LOCAL_RANK")
        notes.numbers(world_size="OMPI_COMM_WORLD_SIZE", local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE")
    else:
        notes.numbers(rank="PMI_RANK", local_rank="MPI_LOCALRANKID")
        notes.numbers(world_size="PMI_SIZE", local_world_size="MPI_LOCALNRANKS")
    rank = notes["rank"]
    world_size = notes["world_size"]
    here = notes["local_world_size"]
    if not here or world_size % here:
        notes.problems.append(
            f"mpirun started {world_size} ranks, {here} of them on this node, so other nodes have another number. "
            "Start as many ranks on each node (mpirun --map-by ppr:N:node, or -ppn N).",
        )
        return
    num_nodes = world_size // here
    notes.put("num_nodes", num_nodes)
    # Ranks fill one node after the other, which is every launcher's default, or their local ranks show that they are
    # dealt out to the nodes in turn.
    if rank % here == notes["local_rank"]:
        notes.put("node_rank", rank // here)
    else:
        notes.put("node_rank", rank % num_nodes)


def read_meeting_place(notes: Notes) -> None:
    """Note where the ranks meet: what is given, else what all of them can know."""
    if notes["num_nodes"] == 1:
        notes.put("main_address", "127.0.0.1")
    # Each rank works out the same port from the job's name, so that two jobs on a node do not meet.
    for name in _JOBS:
        job = notes.environ.get(name)
        if job:
            notes.put("main_port", _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)
    notes.put("main_port", DEFAULT_PORT)
    if notes["main_address"] is None:
        option = "-x MASTER_ADDR=host0" if started_by_open_mpi(notes.environ) else "-genv MASTER_ADDR host0"
        notes.problems.append(
            f"mpirun started ranks on {notes['num_nodes'] or 'several'} nodes, and nothing says where rank 0 is. "
            f"Tell them: mpirun {option} ...",
        )
