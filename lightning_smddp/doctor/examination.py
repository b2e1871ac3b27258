"""One examination: look, measure, report. Alone, or as a rank of the job that a launcher has started."""

from __future__ import annotations

import json
import os
import socket
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

_WIDTH = 16  # characters, of a row's name
_COLUMN = 12  # and of each of its numbers


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
        measured = measure(dist.group.WORLD, device, facts["host"])
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
    """Measure with ranks of this machine alone; or why they could not."""
    try:
        return _measured_here(), None
    except (mp.ProcessRaisedException, mp.ProcessExitedException, RuntimeError, OSError) as error:
        what = f"Ranks of this machine alone do not come together: {_last_line(error)}"
        return None, Finding("error", what, _HOW_TO_MEET)


def _last_line(error: Exception) -> str:
    """What went wrong in a rank: above it there is its traceback."""
    return str(error).strip().splitlines()[-1]


def _measured_here() -> Facts:
    gpus = 0
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    # With one GPU ranks measure on CPU: NCCL wants a GPU for each of them.
    ranks = 2
    if gpus > 1:
        ranks = min(gpus, _MOST_LOCAL_RANKS)
    # On IPv4 alone: torch's own socket takes IPv6, too, and asks the DNS for the name of each rank that comes.
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with tempfile.TemporaryDirectory(prefix="smddp-doctor-") as directory:
        # The first rank leaves two files: what was measured, and before that what it is about to try, for the case that
        # ranks end there.
        path = Path(directory, "measured.json")
        at = Path(directory, "at")
        arguments = (ranks, store.port, gpus > 1, str(path), str(at))
        try:
            mp.start_processes(_local_rank, arguments, nprocs=ranks, start_method="spawn")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            if not at.exists():
                raise
            raise RuntimeError(f"{_last_line(error)} (while trying {at.read_text()})") from error
        measured: Facts = json.loads(path.read_text())
    return measured


def _local_rank(rank: int, world_size: int, port: int, on_gpus: bool, path: str, at: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if on_gpus:
        device = _device(rank, world_size)
    backend, bound = _backend_of(device)
    dist.init_process_group(
        backend,
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_START_S),
        device_id=bound,
    )

    def note(what: str) -> None:
        if rank == 0:
            Path(at).write_text(what)

    try:
        assert dist.group.WORLD is not None
        measured = measure(dist.group.WORLD, device, "this one", note)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(path).write_text(json.dumps(measured))


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
    page = {
        "facts": facts,
        "measured": measured,
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(page, indent=2)


def as_text(facts: Facts, measured: Facts | None, findings: Sequence[Finding]) -> str:
    """A page for people: what was seen, what was measured, and what is wrong, each with its cure."""
    lines = [f"lightning-smddp doctor, on host {facts['host']}"]
    lines += _facts(facts)
    lines.append("")
    if measured is not None:
        lines += _measured(measured)
        lines.append("")
    lines += _findings(findings)
    return "\n".join(lines)


def _row(name: str, value: str, width: int = _WIDTH) -> str:
    return f"  {name.ljust(width)}{value}"


def _facts(facts: Facts) -> list[str]:
    launch = facts["launch"]
    line = "unclear"
    will_set = []
    if launch:
        line = launch["line"]
        will_set = [f"{name}={value}" for name, value in launch.get("will_set", {}).items()]
    versions = [f"{name} {version}" for name, version in facts["versions"].items() if version]
    backends = [name for name, is_there in facts["backends"].items() if is_there]
    gpus = facts["accelerators"]["gpus"] or ["none"]
    shared = "none"
    memory = facts["shared_memory"]
    if memory:
        free = memory["free"] / 2**30
        size = memory["size"] / 2**30
        shared = f"{free:.1f} of {size:.1f} GiB free"
    usable = facts["processors"]["usable"]
    threads = facts["processors"]["threads_of_a_rank"]
    rows = {
        "launcher": line,
        "will be set": ", ".join(will_set),
        "versions": ", ".join(versions),
        "backends": ", ".join(backends),
        "GPUs": ", ".join(gpus),
        "interfaces": ", ".join(facts["network"]["interfaces"]),
        "/dev/shm": shared,
        "processors": f"{usable}, {threads} threads in this process",
    }
    return [_row(name, value) for name, value in rows.items() if value]


def _measured(measured: Facts) -> list[str]:
    ranks = counted(measured["world_size"], "rank")
    nodes = counted(len(measured["nodes"]), "node")
    lines = [f"measured with {ranks} on {nodes}, {measured['device']}"]
    sizes = [_bytes(size) for size in measured["sizes"]]
    lines.append(_row("all-reduce", _columns(sizes)))
    for name, seconds in measured["all_reduce"].items():
        times = [_time(value) for value in seconds]
        lines.append("  " + _row(name, _columns(times), _WIDTH - 2))
    for link in measured["links"]:
        rank = link["rank"]
        host = link["host"]
        lines.append(_row("link", f"to rank {rank} (host {host}): {_speed(link)}"))
    for what, problem in measured.get("paths", {}).items():
        found = problem or "right"
        lines.append(_row("self-test", f"{what}: {found}"))
    for link in measured.get("neighbours", []):
        first, second = link["ranks"]
        lines.append(_row("neighbours", f"ranks {first} and {second}: {_speed(link)}"))
    rate = measured["memory_gb_s"]
    lines.append(_row("memory", f"{rate:.1f} GB/s copied by a rank"))
    return lines


def _columns(texts: Sequence[str]) -> str:
    return "".join(text.rjust(_COLUMN) for text in texts)


def _speed(link: Facts) -> str:
    latency = _time(link["latency_us"] / 1e6)
    return f"{latency}, {link['gigabytes_per_s']:.2f} GB/s"


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["Nothing wrong was found."]
    lines = []
    for finding in findings:
        heading = finding.level.upper()
        if finding.hosts:
            hosts = ", ".join(finding.hosts)
            heading += f" [{hosts}]"
        lines.append(f"{heading}: {finding.what}")
        lines.append(f"    {finding.cure}")
    return lines


def _bytes(size: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            count = size / factor
            return f"{count:g} {unit}"
    return f"{size} B"


def _time(seconds: float) -> str:
    milliseconds = seconds * 1e3
    if milliseconds < 1:
        microseconds = seconds * 1e6
        return f"{microseconds:.0f} us"
    return f"{milliseconds:.2f} ms"
