"""One examination: look, measure, report. Alone, or as a rank of the job that a launcher has started."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_smddp.communication.choose import time_algorithm
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.errors import StartError
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.rendezvous import NCCL_AND_GLOO, RankInfo, join, versions
from lightning_smddp.doctor.facts import LIGHTNINGS, look
from lightning_smddp.doctor.findings import Facts, Finding, find, merged
from lightning_smddp.wording import counted

SIZE = 8 * 2**20  # bytes of a timed all-reduce
_NUMEL = 1000  # of a checked one
_LIMIT = timedelta(seconds=60)  # until all ranks have to be there, and for each collective

_HOW_TO_MEET = "Look at GLOO_SOCKET_IFNAME, /dev/shm, and the limits of processes and memory."
_HOW_TO_SAY = "Set MASTER_ADDR and MASTER_PORT on all ranks, or start the job as docs/launchers.md shows."

_WIDTH = 14  # characters, of a row's name
_MEASURED = "measured.json"


def examine(as_json_text: bool = False) -> int:
    """Print what was found, on the first rank (the others' errors go to stderr); returns the exit code.

    In a process that a launcher has started as one rank of several, all ranks do this together. Else, for measuring,
    some ranks of this machine are started: one for each GPU, or two on CPU.

    Args:
        as_json_text: print one JSON object.

    Returns:
        0, or 1 if something is wrong that training would not survive (``error``); the same on all ranks if they came
        together.
    """
    facts = look()
    launch = facts["launch"] or {}
    measured: Facts | None = None
    findings = find(facts)
    # Nothing is measured where training would not survive: ranks may not even come together.
    if not _code(findings):
        try:
            if (launch.get("world_size") or 1) > 1:
                measured, findings = _as_a_rank(facts)
            else:
                measured = _with_local_ranks()
                findings = find(facts, measured)
        except StartError as error:
            findings = [Finding("error", str(error), "Training would fail likewise."), *findings]
    if not launch.get("rank"):
        print((as_json if as_json_text else as_text)(facts, measured, findings), flush=True)
    elif measured is None:  # else the first rank prints for all
        for finding in findings:
            if finding.level == "error":
                print(f"lightning-smddp doctor: {finding.what} {finding.cure}", file=sys.stderr)
    return _code(findings)


def _code(findings: list[Finding]) -> int:
    return int(any(finding.level == "error" for finding in findings))


def _as_a_rank(facts: Facts) -> tuple[Facts, list[Finding]]:
    """What the ranks of the job have measured, and the findings of all of them."""
    launch = facts["launch"]
    missing = [name for name in ("rank", "local_rank", "main_address", "main_port") if launch[name] is None]
    if missing:
        raise StartError(f"{launch['line']} Not said: {', '.join(missing)}. {_HOW_TO_SAY}")
    os.environ.update(launch["will_set"])  # of the network, as the strategy sets it before it makes a process group
    lightning = next((facts["versions"][name] for name in LIGHTNINGS if name in facts["versions"]), "none")
    rank = RankInfo(launch["rank"], launch["world_size"], versions(lightning))
    device = _device(launch["local_rank"], launch["local_world_size"] or 1)
    backend, bound = _backend_of(device)
    join(rank, (launch["main_address"], launch["main_port"]), backend, bound, _LIMIT, _LIMIT)
    try:
        assert dist.group.WORLD is not None
        measured = measure(dist.group.WORLD, device)
        # What was measured is the same on all ranks.
        gathered = gather(find(facts, None if launch["rank"] else measured))
    finally:
        dist.destroy_process_group()
    # All ranks know all findings, so that they end with the same exit code.
    return measured, merged(list(chain.from_iterable(gathered)))


def _backend_of(device: torch.device) -> tuple[str, torch.device | None]:
    """The backend for messages of ``device``, and the device that its groups are bound to."""
    if device.type == "cuda":
        return NCCL_AND_GLOO, device
    return "gloo", None


def _device(local_rank: int, local_ranks: int) -> torch.device:
    """A GPU, if each rank of this node has one: the ranks of a job measure with one backend."""
    if torch.cuda.is_available() and local_ranks <= torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _with_local_ranks() -> Facts:
    """Measure with ranks of this machine alone, one for each GPU or two on CPU; or why they could not."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = max(2, gpus)  # with one GPU they measure on CPU: NCCL wants a GPU for each of them
    with tempfile.TemporaryDirectory(prefix="smddp-doctor-") as directory:
        try:
            mp.start_processes(_local_rank, (ranks, directory), nprocs=ranks, start_method="spawn")
        except (mp.ProcessRaisedException, mp.ProcessExitedException, RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[-1]  # above it there is a rank's traceback
            raise StartError(f"Ranks of this machine alone do not come together: {reason} {_HOW_TO_MEET}") from None
        measured: Facts = json.loads(Path(directory, _MEASURED).read_text())
        return measured


def _local_rank(rank: int, world_size: int, directory: str) -> None:
    torch.set_num_threads(1)
    device = _device(rank, world_size)
    backend, bound = _backend_of(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=_LIMIT,
        device_id=bound,
    )
    try:
        assert dist.group.WORLD is not None
        measured = measure(dist.group.WORLD, device)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(directory, _MEASURED).write_text(json.dumps(measured))


def measure(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The same on every rank. Collective over ``group``, which is the world.

    Returns:
        ``all_reduce``: algorithm -> seconds of ``size`` bytes, the median of the slowest rank; ``problems``: algorithm
        -> what is wrong with what it gave; ``nodes``: ranks of each; ``notes``: what was not possible.
    """
    communicator = Communicator(group, device, _LIMIT)
    try:
        names = communicator.available()
        problems = {name: _problem_of(name, communicator) for name in names}
        return {
            "nodes": [list(ranks) for ranks in communicator.topology.nodes],
            "device": device.type,
            "size": SIZE,
            "all_reduce": {name: time_algorithm(name, communicator, None, SIZE) for name in names},
            "problems": {name: problem for name, problem in problems.items() if problem is not None},
            "notes": [note for note in communicator.notes if note.startswith("no shared memory")],
        }
    finally:
        communicator.close()


def _problem_of(name: str, communicator: Communicator) -> str | None:
    """What is wrong with an average by this algorithm, on any rank. Collective."""
    ranks = communicator.world_size
    values = torch.arange(_NUMEL, dtype=torch.float32, device=communicator.device)
    algorithm = communicator.algorithm(name)
    averaged = reduce_once(algorithm, values + communicator.rank)
    algorithm.close()
    expected = values + (ranks - 1) / 2
    wrong = int((~averaged.isclose(expected)).sum())  # algorithms multiply by 1 / ranks, which is rounded
    for rank, count in enumerate(gather(wrong, communicator.group)):
        if count:
            return f"rank {rank}: {count} of {_NUMEL} numbers arrived with other values"
    return None


def as_json(facts: Facts, measured: Facts | None, findings: Sequence[Finding]) -> str:
    """One object: ``facts``, ``measured`` (or null), ``findings``."""
    page = {"facts": facts, "measured": measured, "findings": [asdict(finding) for finding in findings]}
    return json.dumps(page, indent=2)


def as_text(facts: Facts, measured: Facts | None, findings: Sequence[Finding]) -> str:
    """A page for people: what was seen, what was measured, and what is wrong, each with its cure."""
    lines = [f"lightning-smddp doctor, on host {facts['host']}"]
    lines += [f"  {name:<{_WIDTH}}{value}" for name, value in _rows(facts, measured).items() if value]
    lines.append("")
    for finding in findings:
        where = f" [{', '.join(finding.hosts)}]" if finding.hosts else ""
        lines += [f"{finding.level.upper()}{where}: {finding.what}", f"    {finding.cure}"]
    if not findings:
        lines.append("Nothing wrong was found.")
    return "\n".join(lines)


def _rows(facts: Facts, measured: Facts | None) -> dict[str, str]:
    launch = facts["launch"] or {"line": "unclear", "will_set": {}}
    memory = facts["shared_memory"]
    processors = facts["processors"]
    rows = {
        "launcher": launch["line"],
        "will be set": ", ".join(f"{name}={value}" for name, value in launch["will_set"].items()),
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        "backends": ", ".join(name for name, is_there in facts["backends"].items() if is_there),
        "GPUs": ", ".join(facts["accelerators"]["gpus"]) or "none",
        "interfaces": ", ".join(facts["network"]["interfaces"]),
        "/dev/shm": "none",
        "processors": f"{processors['usable']}, {processors['threads_of_a_rank']} threads in this process",
    }
    if memory:
        rows["/dev/shm"] = f"{memory['free'] / 2**30:.1f} of {memory['size'] / 2**30:.1f} GiB free"
    if measured is not None:
        ranks = counted(sum(len(of_node) for of_node in measured["nodes"]), "rank")
        nodes = counted(len(measured["nodes"]), "node")
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in measured["all_reduce"].items())
        rows["all-reduce"] = f"{measured['size'] / 2**20:g} MiB, {ranks} on {nodes}, {measured['device']}: {times}"
    return rows
