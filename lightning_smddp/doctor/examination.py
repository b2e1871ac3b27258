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

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_smddp.communication.errors import StartError
from lightning_smddp.communication.objects import gather
from lightning_smddp.communication.rendezvous import NCCL_AND_GLOO, RankInfo, join, versions
from lightning_smddp.doctor.facts import look
from lightning_smddp.doctor.findings import Facts, Finding, find, merged
from lightning_smddp.doctor.measuring import measure
from lightning_smddp.wording import counted

_START_S = 60.0  # seconds, until all ranks have to be there
_MOST_LOCAL_RANKS = 8

_HOW_TO_MEET = (
    "Training would fail likewise. Look at GLOO_SOCKET_IFNAME, /dev/shm, and the limits of processes and memory."
)
_HOW_TO_SAY = "Set MASTER_ADDR and MASTER_PORT on all ranks, or start the job as docs/launchers.md shows."

_WIDTH = 14  # characters, of a row's name
_MEASURED = "measured.json"


def examine(as_json_text: bool = False, measures: bool = True) -> int:
    """Print what was found, on the first rank (the others' errors go to stderr); returns the exit code.

    In a process that a launcher has started as one rank of several, all ranks do this together. Else, for measuring,
    some ranks of this machine are started: one for each GPU, or two on CPU.

    Args:
        as_json_text: print one JSON object.
        measures: False only looks.

    Returns:
        0, or 1 if something is wrong that training would not survive (``error``); the same on all ranks if they came
        together.
    """
    facts = look()
    launch = facts["launch"] or {}
    # Nothing is measured where training would not survive: ranks may not even come together.
    findings = find(facts)
    if not measures or _code(findings):
        return _told(facts, None, findings, as_json_text)
    if (launch.get("world_size") or 1) > 1:
        return _as_a_rank(facts, as_json_text)
    measured, problem = _with_local_ranks()
    findings = find(facts, measured)
    if problem is not None:
        findings.insert(0, problem)
    return _told(facts, measured, findings, as_json_text)


def _as_a_rank(facts: Facts, as_json_text: bool) -> int:
    launch = facts["launch"]
    missing = [name for name in ("rank", "local_rank", "main_address", "main_port") if launch[name] is None]
    if missing:
        names = ", ".join(missing)
        problem = Finding("error", f"{launch['line']} Not said: {names}.", _HOW_TO_SAY)
        return _told(facts, None, [*find(facts), problem], as_json_text)
    device = _device(launch["local_rank"], launch["local_world_size"] or 1)
    try:
        _meet(launch, facts, device)
    except StartError as error:
        problem = Finding("error", str(error), "Without this the ranks of a job do not come together.")
        return _told(facts, None, [*find(facts), problem], as_json_text)
    try:
        assert dist.group.WORLD is not None
        measured = measure(dist.group.WORLD, device)
        local = find(facts)
        if launch["rank"] == 0:  # what was measured is the same on all ranks
            local = find(facts, measured)
        gathered = gather(local)
    finally:
        dist.destroy_process_group()
    # All ranks know all findings, so that they end with the same exit code; only the first one prints.
    findings = merged(list(chain.from_iterable(gathered)))
    if launch["rank"] == 0:
        _print(facts, measured, findings, as_json_text)
    return _code(findings)


def _meet(launch: Facts, facts: Facts, device: torch.device) -> None:
    os.environ.update(launch["will_set"])  # of the network, as the strategy sets it before it makes a process group
    lightning = facts["versions"]["lightning"] or facts["versions"]["pytorch-lightning"]
    card = RankInfo(launch["rank"], launch["world_size"], versions(str(lightning)))
    backend, bound = _backend_of(device)
    limit = timedelta(seconds=_START_S)
    join(card, (launch["main_address"], launch["main_port"]), backend, bound, limit, limit)


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


def _with_local_ranks() -> tuple[Facts | None, Finding | None]:
    """Measure with ranks of this machine alone, one for each GPU or two on CPU; or why they could not."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # With one GPU ranks measure on CPU: NCCL wants a GPU for each of them.
    ranks = min(gpus, _MOST_LOCAL_RANKS) if gpus > 1 else 2
    with tempfile.TemporaryDirectory(prefix="smddp-doctor-") as directory:
        try:
            mp.start_processes(_local_rank, (ranks, gpus > 1, directory), nprocs=ranks, start_method="spawn")
        except (mp.ProcessRaisedException, mp.ProcessExitedException, RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[-1]  # above it there is a rank's traceback
            return None, Finding("error", f"Ranks of this machine alone do not come together: {reason}", _HOW_TO_MEET)
        return json.loads(Path(directory, _MEASURED).read_text()), None


def _local_rank(rank: int, world_size: int, on_gpus: bool, directory: str) -> None:
    torch.set_num_threads(1)
    device = _device(rank, world_size) if on_gpus else torch.device("cpu")
    backend, bound = _backend_of(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_START_S),
        device_id=bound,
    )
    try:
        assert dist.group.WORLD is not None
        measured = measure(dist.group.WORLD, device)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(directory, _MEASURED).write_text(json.dumps(measured))


def _told(facts: Facts, measured: Facts | None, findings: list[Finding], as_json_text: bool) -> int:
    """The exit code, behind the page."""
    _print(facts, measured, findings, as_json_text)
    return _code(findings)


def _print(facts: Facts, measured: Facts | None, findings: list[Finding], as_json_text: bool) -> None:
    launch = facts["launch"] or {}
    if launch.get("rank"):  # not the first one, which prints for all
        for finding in findings:
            if finding.level == "error":
                print(f"lightning-smddp doctor: {finding.what} {finding.cure}", file=sys.stderr)
        return
    if as_json_text:
        text = as_json(facts, measured, findings)
    else:
        text = as_text(facts, measured, findings)
    print(text, flush=True)


def _code(findings: list[Finding]) -> int:
    return int(any(finding.level == "error" for finding in findings))


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
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version),
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
