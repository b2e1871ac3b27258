"""One examination: look, measure, report. Alone, or as a rank of the job that a launcher has started."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_smddp.communication.choose import time_algorithm
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.errors import StartError
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.rendezvous import NCCL_AND_GLOO, RankInfo, join, versions
from lightning_smddp.doctor.machine import Facts, Finding, find, look
from lightning_smddp.wording import counted

SIZE = 8 * 2**20  # bytes of a timed all-reduce
_NUMEL = 1000  # of a checked one
_LIMIT = timedelta(seconds=60)  # until all ranks have to be there, and for each collective
_WIDTH = 14  # characters, of a row's name

Measured = Mapping[str, Any]  # see `measure`
Places = dict[Finding, list[str]]  # what is wrong on which hosts; on none by name where all are meant


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
    found: Places = {finding: [facts.host] for finding in find(facts)}
    measured: Measured | None = None
    # Nothing is measured where training would not survive: ranks may not even come together.
    if not _code(found):
        try:
            if (facts.launch.world_size or 1) > 1:
                measured, found = _with_the_job(facts)
            else:
                measured = _with_local_ranks()
            found = {**_wrong_with(measured), **found}
        except StartError as error:
            found = {Finding("error", str(error), "Training would fail likewise."): [facts.host], **found}
    if not facts.launch.rank:
        print((as_json if as_json_text else as_text)(facts, measured, found), flush=True)
    elif measured is None:  # else the first rank prints for all
        print("\n".join(_lines(found)), file=sys.stderr)
    return _code(found)


def _code(found: Places) -> int:
    return int(any(finding.level == "error" for finding in found))


def _with_the_job(facts: Facts) -> tuple[Measured, Places]:
    """What the ranks of the job have measured, and what is wrong with their hosts."""
    launch = facts.launch
    if launch.rank is None or launch.world_size is None or launch.local_rank is None:
        raise StartError(f"{launch.describe()} That is too little: start the job as docs/launchers.md shows.")
    if launch.main_address is None or launch.main_port is None:
        raise StartError(f"{launch.describe()} Set MASTER_ADDR and MASTER_PORT on all ranks.")
    os.environ.update(facts.will_set)  # of the network, as the strategy sets it before it makes a process group
    card = RankInfo(launch.rank, launch.world_size, versions(facts.versions.get("lightning", "none")))
    device = _device(launch.local_rank, launch.local_world_size or 1)
    found: Places = {}
    group = _join(card, (launch.main_address, launch.main_port), device)
    try:
        measured = measure(group, device)
        # All ranks know all of it, so that they end with the same exit code.
        for host, of_rank in gather((facts.host, find(facts))):
            for finding in of_rank:
                hosts = found.setdefault(finding, [])
                if host not in hosts:
                    hosts.append(host)
    finally:
        dist.destroy_process_group()
    return measured, found


def _device(local_rank: int, local_ranks: int) -> torch.device:
    """A GPU, if each rank of this node has one: the ranks of a job measure with one backend."""
    if local_ranks <= torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _join(card: RankInfo, address: tuple[str, int], device: torch.device) -> dist.ProcessGroup:
    if device.type == "cuda":
        join(card, address, NCCL_AND_GLOO, device, _LIMIT, _LIMIT)
    else:
        join(card, address, "gloo", None, _LIMIT, _LIMIT)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _with_local_ranks() -> Measured:
    """Measure with ranks of this machine alone, one for each GPU or two on CPU."""
    ranks = max(2, torch.cuda.device_count())  # with one GPU they measure on CPU: NCCL wants a GPU for each of them
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    answer = mp.get_context("spawn").SimpleQueue()
    try:
        mp.start_processes(_local_rank, (ranks, port, answer), nprocs=ranks, start_method="spawn")
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]  # above it there is a rank's traceback
        raise StartError(f"Ranks of this machine alone do not come together: {reason}") from None
    measured: Measured = answer.get()
    return measured


def _local_rank(rank: int, ranks: int, port: int, answer: Any) -> None:
    torch.set_num_threads(1)
    device = _device(rank, ranks)
    group = _join(RankInfo(rank, ranks, {}), ("127.0.0.1", port), device)
    try:
        measured = measure(group, device)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        answer.put(measured)


def measure(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The same on every rank. Collective over ``group``.

    Returns:
        ``ranks``, ``nodes``: how many; ``device``: its type; ``size``: bytes of each all-reduce; ``all_reduce``:
        algorithm -> seconds, the median of the slowest rank; ``problems``: algorithm -> what is wrong with what it
        gave; ``notes``: what was not possible.
    """
    communicator = Communicator(group, device, _LIMIT)
    try:
        names = communicator.available()
        problems = {name: _problem_of(name, communicator) for name in names}
        return {
            "ranks": communicator.world_size,
            "nodes": communicator.topology.num_nodes,
            "device": device.type,
            "size": SIZE,
            "all_reduce": {name: time_algorithm(name, communicator, None, SIZE) for name in names},
            "problems": {name: problem for name, problem in problems.items() if problem is not None},
            "notes": communicator.notes,
        }
    finally:
        communicator.close()


def _problem_of(name: str, communicator: Communicator) -> str | None:
    """What is wrong with an average by this algorithm, on any rank. Collective."""
    values = torch.arange(_NUMEL, dtype=torch.float32, device=communicator.device)
    algorithm = communicator.algorithm(name)
    averaged = reduce_once(algorithm, values + communicator.rank)
    algorithm.close()
    expected = values + (communicator.world_size - 1) / 2
    wrong = int((~averaged.isclose(expected)).sum())  # algorithms multiply by 1 / ranks, which is rounded
    for rank, count in enumerate(gather(wrong, communicator.group)):
        if count:
            return f"rank {rank}: {count} of {_NUMEL} numbers arrived with other values"
    return None


def _wrong_with(measured: Measured) -> Places:
    """What is wrong by what was measured, with no host of its own."""
    found: Places = {}
    for name, problem in measured["problems"].items():
        what = f"The all-reduce by {name} failed: {problem}."
        cure = "Training would give wrong numbers. On GPUs look at the driver, and at what NCCL_DEBUG=INFO says."
        found[Finding("error", what, cure)] = []
    for note in measured["notes"]:
        found[Finding("warning", note, "Ranks of a node average more slowly without it.")] = []
    return found


def as_json(facts: Facts, measured: Measured | None, found: Places) -> str:
    """One object: ``facts``, ``measured`` (or null), ``findings``."""
    findings = [{**asdict(finding), "hosts": hosts} for finding, hosts in found.items()]
    return json.dumps({"facts": asdict(facts), "measured": measured, "findings": findings}, indent=2)


def as_text(facts: Facts, measured: Measured | None, found: Places) -> str:
    """A page for people: what was seen, what was measured, and what is wrong, each with its cure."""
    lines = [f"lightning-smddp doctor, on host {facts.host}"]
    lines += [f"  {name:<{_WIDTH}}{value}" for name, value in _rows(facts, measured).items() if value]
    return "\n".join([*lines, "", *_lines(found)])


def _lines(found: Places) -> list[str]:
    lines = []
    for finding in sorted(found, key=lambda finding: finding.level):
        where = ", ".join(found[finding]) or "all hosts"
        lines += [f"{finding.level.upper()} [{where}]: {finding.what}", f"    {finding.cure}"]
    return lines or ["Nothing wrong was found."]


def _rows(facts: Facts, measured: Measured | None) -> dict[str, str]:
    rows = {
        "launcher": facts.launch.describe(),
        "will be set": ", ".join(f"{name}={value}" for name, value in facts.will_set.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "backends": "gloo, nccl" if dist.is_nccl_available() else "gloo",
        "GPUs": ", ".join(facts.gpus) or "none",
        "interfaces": ", ".join(facts.interfaces),
        "/dev/shm": "none",
        "processors": f"{facts.processors}, {facts.threads} threads in this process",
    }
    if facts.shared_memory is not None:
        size, free = facts.shared_memory
        rows["/dev/shm"] = f"{free / 2**30:.1f} of {size / 2**30:.1f} GiB free"
    if measured is not None:
        where = f"{counted(measured['ranks'], 'rank')} on {counted(measured['nodes'], 'node')}, {measured['device']}"
        times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in measured["all_reduce"].items())
        rows["all-reduce"] = f"{measured['size'] / 2**20:g} MiB, {where}: {times}"
    return rows
