"""One examination: look, measure, report. Alone, or as a rank of the job that a launcher has started."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_smddp.communication.choose import time_algorithm
from lightning_smddp.communication.communicator import Communicator, reduce_once
from lightning_smddp.communication.groups import world
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.rendezvous import NCCL_AND_GLOO, RankInfo, StartError, join, versions
from lightning_smddp.doctor.machine import Facts, Finding, find, look
from lightning_smddp.wording import counted

_SIZE = 8 * 2**20  # bytes of a timed all-reduce
_NUMEL = 1000  # of a checked one
_LIMIT = timedelta(seconds=60)  # until all ranks have to be there, and for each collective
_WIDTH = 14  # characters, of a row's name

Places = set[tuple[Finding, str]]  # what is wrong, on which host


def examine() -> int:
    """Print what was found, on the first rank (the others' errors go to stderr); returns the exit code.

    In a process that a launcher has started as one rank of several, all ranks do this together. Else, for measuring,
    some ranks of this machine are started: one for each GPU, or two on CPU.

    Returns:
        0, or 1 if something is wrong that training would not survive (``error``); the same on all ranks if they came
        together.
    """
    facts = look()
    found = {(finding, facts.host) for finding in find(facts)}
    line = ""
    # Nothing is measured where training would not survive: ranks may not even come together.
    if not _code(found):
        try:
            if (facts.launch.world_size or 1) > 1:
                line, found = _with_the_job(facts, found)
            else:
                line, measured = _with_local_ranks()
                found |= measured
        except StartError as error:
            found.add((Finding("error", f"{error} Training would fail likewise."), facts.host))
    if not facts.launch.rank:
        print(as_text(facts, line, found), flush=True)
    elif not line:  # else the first rank prints for all
        print("\n".join(_lines(found)), file=sys.stderr)
    return _code(found)


def _code(found: Places) -> int:
    return int(any(finding.level == "error" for finding, _ in found))


def _with_the_job(facts: Facts, found: Places) -> tuple[str, Places]:
    """What the ranks of the job have measured, and what is wrong with their hosts."""
    launch = facts.launch
    known: list[Any] = [launch.rank, launch.world_size, launch.local_rank, launch.main_address, launch.main_port]
    if None in known:
        cure = "Start the job as docs/launchers.md shows, with MASTER_ADDR and MASTER_PORT on all ranks."
        raise StartError(f"{launch.describe()} {cure}")
    os.environ.update(facts.will_set)  # of the network, as the strategy sets it before it makes a process group
    rank, world_size, local_rank, address, port = known
    card = RankInfo(rank, world_size, versions(facts.versions.get("lightning", "none")))
    return _together(card, (address, port), _device(local_rank, launch.local_world_size or 1), found)


def _together(card: RankInfo, address: tuple[str, int], device: torch.device, found: Places) -> tuple[str, Places]:
    """Meet, and measure; with that and what each rank has found, which are the same on all ranks. Collective."""
    on_gpu = device.type == "cuda"
    join(card, address, NCCL_AND_GLOO if on_gpu else "gloo", device if on_gpu else None, _LIMIT, _LIMIT)
    try:
        line, wrong = measure(world(), device)
        everywhere = {(finding, "all hosts") for finding in wrong}
        return line, everywhere.union(*gather(found))
    finally:
        dist.destroy_process_group()


def _device(local_rank: int, local_ranks: int) -> torch.device:
    """A GPU, if each rank of this node has one: the ranks of a job measure with one backend."""
    if local_ranks <= torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _with_local_ranks() -> tuple[str, Places]:
    """Measure with ranks of this machine alone, one for each GPU or two on CPU."""
    ranks = max(2, torch.cuda.device_count())  # with one GPU they measure on CPU: NCCL wants a GPU for each of them
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    print(f"doctor: starting {counted(ranks, 'process')} of this machine to measure", file=sys.stderr, flush=True)
    answer = mp.get_context("spawn").SimpleQueue()
    try:
        mp.start_processes(_local_rank, (ranks, port, answer), nprocs=ranks, start_method="spawn")
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]  # above it there is a rank's traceback
        raise StartError(f"Ranks of this machine alone do not come together: {reason}") from None
    measured: tuple[str, Places] = answer.get()
    return measured


def _local_rank(rank: int, ranks: int, port: int, answer: Any) -> None:
    torch.set_num_threads(1)
    measured = _together(RankInfo(rank, ranks, {}), ("127.0.0.1", port), _device(rank, ranks), set())
    if rank == 0:
        answer.put(measured)


def measure(group: dist.ProcessGroup, device: torch.device) -> tuple[str, list[Finding]]:
    """The ranks and, of each algorithm, the median of the slowest one, as a line; what is wrong. Collective."""
    communicator = Communicator(group, device, _LIMIT)
    findings, times = [], []
    try:
        for name in communicator.available():
            wrong = _ranks_with_other_values(name, communicator)
            if wrong:
                what = f"The all-reduce by {name} gave wrong numbers to {counted(len(wrong), 'rank')}: {wrong}. "
                cure = "On GPUs look at the driver, and at what NCCL_DEBUG=INFO says."
                findings.append(Finding("error", what + cure))
            times.append(f"{name} {1e3 * time_algorithm(name, communicator, None, _SIZE):.3g} ms")
    finally:
        communicator.close()
    for note in communicator.notes:
        findings.append(Finding("warning", f"Ranks of a node average more slowly: {note}"))
    ranks = counted(communicator.world_size, "rank")
    nodes = counted(communicator.topology.num_nodes, "node")
    return f"{_SIZE / 2**20:g} MiB, {ranks} on {nodes}, {device.type}: {', '.join(times)}", findings


def _ranks_with_other_values(name: str, communicator: Communicator) -> list[int]:
    """Those for which an average by this algorithm is not what it should be. Collective."""
    values = torch.arange(_NUMEL, dtype=torch.float32, device=communicator.device)
    algorithm = communicator.algorithm(name)
    averaged = reduce_once(algorithm, values + communicator.rank)
    algorithm.close()
    expected = values + (communicator.world_size - 1) / 2
    is_right = torch.allclose(averaged, expected)  # algorithms multiply by 1 / ranks, which is rounded
    return [rank for rank, was_right in enumerate(gather(is_right, communicator.group)) if not was_right]


def as_text(facts: Facts, measured: str, found: Places) -> str:
    """A page for people: what was seen, what was measured, and what is wrong, each with its cure."""
    shared_memory = "none"
    if facts.shared_memory is not None:
        size, free = facts.shared_memory
        shared_memory = f"{free / 2**30:.1f} of {size / 2**30:.1f} GiB free"
    rows = {
        "launcher": facts.launch.describe(),
        "will be set": ", ".join(f"{name}={value}" for name, value in facts.will_set.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "backends": "gloo, nccl" if dist.is_nccl_available() else "gloo",
        "GPUs": ", ".join(facts.gpus) or "none",
        "interfaces": ", ".join(facts.interfaces),
        "/dev/shm": shared_memory,
        "processors": f"{facts.processors}, {facts.threads} threads in this process",
        "all-reduce": measured,
    }
    lines = [f"lightning-smddp doctor, on host {facts.host}"]
    lines += [f"  {name:<{_WIDTH}}{value}" for name, value in rows.items() if value]
    return "\n".join([*lines, "", *_lines(found)])


def _lines(found: Places) -> list[str]:
    lines = []
    for finding in sorted({finding for finding, _ in found}):
        where = ", ".join(sorted(host for other, host in found if other == finding))
        lines.append(f"{finding.level.upper()} [{where}]: {finding.text}")
    return lines or ["Nothing wrong was found."]
