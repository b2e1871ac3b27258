"""What Slurm's ``srun`` says. Lightning's rules, and what they overlook."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lightning_smddp.launchers.launch import Notes


def started_by_srun(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a Slurm job: Lightning's rule, and a task number, which a shell of salloc has not."""
    interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in environ and "SLURM_PROCID" in environ and not interactive


def in_allocation_only(environ: Mapping[str, str]) -> bool:
    """Whether Lightning would take a shell of an allocation for a task, and then miss the task's number."""
    interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in environ and "SLURM_PROCID" not in environ and not interactive


def read(notes: Notes) -> str:
    """Note rank, world size and addresses from the variables that ``srun`` sets for each task."""
    environ = notes.environ
    notes.number("rank", "SLURM_PROCID")
    notes.number("local_rank", "SLURM_LOCALID")
    notes.number("world_size", "SLURM_NTASKS")
    notes.number("local_world_size", "SLURM_NTASKS_PER_NODE")
    notes.number("node_rank", "SLURM_NODEID")
    notes.number("num_nodes", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    notes.text("main_address", "MASTER_ADDR")
    notes.number("main_port", "MASTER_PORT")
    nodes = environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes:
        notes.put("main_address", first_host(nodes), "SLURM_NODELIST")
    job = environ.get("SLURM_JOB_ID", "")
    if job.isdecimal():
        notes.put("main_port", int(job[-4:]) + 15000, "from SLURM_JOB_ID")
    if notes["world_size"] > 1 and not {"SLURM_STEP_ID", "SLURM_STEPID"} & environ.keys():
        notes.problem(
            f"This Slurm job has SLURM_NTASKS={notes['world_size']} tasks, but this process was not started by srun, "
            "so it would wait for the others for ever.",
            "Write srun before python in the batch script.",
        )
    return ""


def first_host(nodes: str) -> str:
    """The first name of Slurm's list of nodes: ``"gpu[03-05,09],cpu1"`` gives ``"gpu03"``."""
    first = re.match(r"[^,\[]*(\[[^\]]*\][^,\[]*)*", nodes.strip().split(" ")[0])
    assert first is not None  # it matches nothing at least
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group(0))
