"""One examination: look, measure, report. Alone, or as a rank of the job that a launcher has started."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_smddp.communication.errors import StartError
from lightning_smddp.communication.rank_info import versions
from lightning_smddp.communication.rendezvous import RendezvousConfig, join
from lightning_smddp.doctor.facts import look
from lightning_smddp.doctor.findings import Finding, find, merged
from lightning_smddp.doctor.measuring import measure
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wording import counted

_START_S = 60.0
_MOST_LOCAL_RANKS = 8

_HOW_TO_MEET = (
    "Training would fail likewise. Look at GLOO_SOCKET_IFNAME, /dev/shm, and the limits of processes and memory."
)
_HOW_TO_SAY = "Set MASTER_ADDR and MASTER_PORT on all ranks, or start the job as docs/launchers.md shows."

_WIDTH = 16


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
    findings = find(facts)
    if not measures or _code(findings):
        _print(facts, None, findings, as_json_text)
        return _code(findings)
    if (launch.get("world_size") or 1) > 1:
        return _as_a_rank(facts, as_json_text)
    measured, problem = _with_local_ranks()
    findings = find(facts, measured)
    if problem is not None:
        findings.insert(0, problem)
    _print(facts, measured, findings, as_json_text)
    return _code(findings)


def _as_a_rank(facts: dict[str, Any], as_json_text: bool) -> int:
    launch = facts["launch"]
    missing = [name for name in ("rank", "local_rank", "main_address", "main_port") if launch[name] is None]
    if missing:
        findings = [*find(facts), Finding("error", f"{launch['line']} Not said: {', '.join(missing)}.", _HOW_TO_SAY)]
        _print(facts, None, findings, as_json_text)
        return 1
    device = _device(launch["local_rank"], launch["local_world_size"] or 1)
    try:
        _meet(launch, facts, device)
    except StartError as error:
        findings = [*find(facts), Finding("error", str(error), "Without this the ranks of a job do not come together.")]
        _print(facts, None, findings, as_json_text)
        return 1
    try:
        assert dist.group.WORLD is not None
        measured = measure(dist.group.WORLD, device, facts["host"])
        local = find(facts)
        if launch["rank"] == 0:  # what was measured is the same on all ranks
            local = find(facts, measured)
        gathered = gather_json([finding.to_json() for finding in local], dist.group.WORLD, device)
    finally:
        dist.destroy_process_group()
    findings = merged([Finding.from_json(values) for values in chain.from_iterable(gathered)])
    if launch["rank"] == 0:
        _print(facts, measured, findings, as_json_text)
    return _code(findings)


def _meet(launch: Mapping[str, Any], facts: Mapping[str, Any], device: torch.device) -> None:
    os.environ.update(launch["will_set"])
    meeting = RendezvousConfig(
        rank=launch["rank"],
        world_size=launch["world_size"],
        spans_nodes=(launch["num_nodes"] or 1) > 1,
        address=launch["main_address"],
        port=launch["main_port"],
        versions=versions(str(facts["versions"]["lightning"] or facts["versions"]["pytorch-lightning"])),
    )
    backend, bound = _backend_of(device)
    limit = timedelta(seconds=_START_S)
    join(meeting, backend, bound, limit, limit)


def _backend_of(device: torch.device) -> tuple[str, torch.device | None]:
    """The backend for messages of ``device``, and the device that its groups are bound to."""
    if device.type == "cuda":
        return "nccl", device
    return "gloo", None


def _device(local_rank: int, local_ranks: int) -> torch.device:
    """A GPU, if each rank of this node has one: the ranks of a job measure with one backend."""
    if torch.cuda.is_available() and local_ranks <= torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _with_local_ranks() -> tuple[dict[str, Any] | None, Finding | None]:
    """Measure with ranks of this machine alone; or why they could not."""
    try:
        return _measured_here(), None
    except (mp.ProcessRaisedException, mp.ProcessExitedException, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        return None, Finding("error", f"Ranks of this machine alone do not come together: {reason}", _HOW_TO_MEET)


def _measured_here() -> dict[str, Any]:
    gpus, ranks = 0, 2
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    if gpus > 1:
        ranks = min(gpus, _MOST_LOCAL_RANKS)
    # On IPv4 alone: torch's own socket takes IPv6, too, and asks the DNS for the name of each rank that comes.
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with tempfile.TemporaryDirectory(prefix="smddp-doctor-") as directory:
        path = os.path.join(directory, "measured.json")
        arguments = (ranks, store.port, gpus > 1, path)
        try:
            mp.start_processes(_local_rank, arguments, nprocs=ranks, start_method="spawn")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            if not Path(f"{path}.at").exists():
                raise
            reason = str(error).strip().splitlines()[-1]
            raise RuntimeError(f"{reason} (while trying {Path(f'{path}.at').read_text()})") from error
        measured: dict[str, Any] = json.loads(Path(path).read_text())
    return measured


def _local_rank(rank: int, world_size: int, port: int, on_gpus: bool, path: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if on_gpus:
        device = _device(rank, world_size)
    backend, bound = _backend_of(device)
    store, limit = dist.TCPStore("127.0.0.1", port, is_master=False), timedelta(seconds=_START_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=bound)

    def note(what: str) -> None:
        if rank == 0:  # for the case that ranks end there
            Path(f"{path}.at").write_text(what)

    try:
        assert dist.group.WORLD is not None
        measured = measure(dist.group.WORLD, device, "this one", note)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(path).write_text(json.dumps(measured))


def _print(
    facts: Mapping[str, Any], measured: Mapping[str, Any] | None, findings: list[Finding], as_json_text: bool
) -> None:
    if (facts["launch"] or {}).get("rank"):
        for finding in findings:
            if finding.level == "error":
                print(f"lightning-smddp doctor: {finding.what} {finding.cure}", file=sys.stderr)
        return
    if as_json_text:
        print(as_json(facts, measured, findings), flush=True)
    else:
        print(as_text(facts, measured, findings), flush=True)


def _code(findings: list[Finding]) -> int:
    return int(any(finding.level == "error" for finding in findings))


def as_json(facts: Mapping[str, Any], measured: Mapping[str, Any] | None, findings: Sequence[Finding]) -> str:
    """One object: ``facts``, ``measured`` (or null), ``findings``."""
    found = [asdict(finding) for finding in findings]
    return json.dumps({"facts": facts, "measured": measured, "findings": found}, indent=2)


def as_text(facts: Mapping[str, Any], measured: Mapping[str, Any] | None, findings: Sequence[Finding]) -> str:
    """A page for people: what was seen, what was measured, and what is wrong, each with its cure."""
    lines = [f"lightning-smddp doctor, on host {facts['host']}", *_facts(facts)]
    if measured is not None:
        lines += ["", *_measured(measured)]
    return "\n".join([*lines, "", *_findings(findings)])


def _row(name: str, value: str) -> str:
    return f"  {name:<{_WIDTH}}{value}"


def _facts(facts: Mapping[str, Any]) -> list[str]:
    launch, memory, processors = facts["launch"], facts["shared_memory"], facts["processors"]
    line, will_set = "unclear", []
    if launch:
        line = launch["line"]
        will_set = [f"{name}={value}" for name, value in launch.get("will_set", {}).items()]
    versions = [f"{name} {version}" for name, version in facts["versions"].items() if version]
    backends = [name for name, there in facts["backends"].items() if there]
    gpus = facts["accelerators"]["gpus"] or ["none"]
    interfaces = []
    for name, addresses in facts["network"]["interfaces"].items():
        listed = ", ".join(addresses) or "no address"
        interfaces.append(f"{name} ({listed})")
    shared = "none"
    if memory:
        free, size = memory["free"] / 2**30, memory["size"] / 2**30
        shared = f"{free:.1f} of {size:.1f} GiB free"
    rows = [
        ("launcher", line),
        ("will be set", ", ".join(will_set)),
        ("versions", ", ".join(versions)),
        ("backends", ", ".join(backends)),
        ("GPUs", ", ".join(gpus)),
        ("interfaces", ", ".join(interfaces)),
        ("/dev/shm", shared),
        ("processors", f"{processors['usable']}, {processors['threads_of_a_rank']} threads in this process"),
    ]
    return [_row(name, value) for name, value in rows if value]


def _measured(measured: Mapping[str, Any]) -> list[str]:
    nodes = measured["nodes"]
    ranks = counted(measured["world_size"], "rank")
    lines = [f"measured with {ranks} on {counted(len(nodes), 'node')}, {measured['device']}"]
    columns = [f"{_bytes(size):>12}" for size in measured["sizes"]]
    lines.append(_row("all-reduce", "".join(columns)))
    for name, seconds in measured["all_reduce"].items():
        columns = [f"{_time(value):>12}" for value in seconds]
        lines.append(f"    {name:<{_WIDTH - 2}}" + "".join(columns))
    for link in measured["links"]:
        lines.append(_row("link", f"to rank {link['rank']} (host {link['host']}): {_speed(link)}"))
    for what, problem in measured.get("paths", {}).items():
        lines.append(_row("self-test", f"{what}: {problem or 'right'}"))
    for link in measured.get("neighbours", []):
        first, second = link["ranks"]
        lines.append(_row("neighbours", f"ranks {first} and {second}: {_speed(link)}"))
    lines.append(_row("memory", f"{measured['memory_gb_s']:.1f} GB/s copied by a rank"))
    return lines


def _speed(link: Mapping[str, Any]) -> str:
    latency = _time(link["latency_us"] / 1e6)
    return f"{latency}, {link['gigabytes_per_s']:.2f} GB/s"


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["Nothing wrong was found."]
    lines = []
    for finding in findings:
        where = ""
        if finding.hosts:
            where = f" [{', '.join(finding.hosts)}]"
        lines += [f"{finding.level.upper()}{where}: {finding.what}", f"    {finding.cure}"]
    return lines


def _bytes(size: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms"
