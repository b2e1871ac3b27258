"""What is wrong, and the cure: plain functions of :func:`~lightning_smddp.doctor.facts.look`'s facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

_MIB = 2**20
_LEAST_SHARED_MEMORY = 1024  # MiB of /dev/shm
_LEAST_FILES = 1024  # that a process may have open
Facts = Mapping[str, Any]  # as JSON carries them: what is known of a host, or was measured
_Found = Iterator[tuple[str, str]]  # what is wrong, and its cure


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        level: ``"error"``: training does not start or gives nothing; ``"warning"``: it is slower, or fragile.
        what: a sentence.
        cure: what to do.
        hosts: where; empty for all.
    """

    level: Literal["error", "warning"]
    what: str
    cure: str
    hosts: tuple[str, ...] = ()


def find(facts: Facts, measured: Facts | None = None) -> list[Finding]:
    """What is wrong with a host by its facts, and with all-reduces as measured; errors first."""
    hosts = (str(facts["host"]),)
    found = []
    for look in _ERRORS:
        found += [Finding("error", what, cure, hosts) for what, cure in look(facts)]
    for look in _WARNINGS:
        found += [Finding("warning", what, cure, hosts) for what, cure in look(facts)]
    if measured is not None:
        found += _measured(measured)
    return sorted(found, key=lambda finding: finding.level)


def merged(findings: list[Finding]) -> list[Finding]:
    """The same one of several hosts is one."""
    found: dict[Finding, dict[str, None]] = {}  # without its hosts -> these, in the order in which they told it
    for finding in findings:
        found.setdefault(replace(finding, hosts=()), {}).update(dict.fromkeys(finding.hosts))
    told = [replace(finding, hosts=tuple(hosts)) for finding, hosts in found.items()]
    return sorted(told, key=lambda finding: finding.level)


# ---- errors ----


def _launcher(facts: Facts) -> _Found:
    if facts["launch_problem"] is not None:
        yield facts["launch_problem"], "Start the job as docs/launchers.md shows."
    yield from (facts["launch"] or {}).get("problems", ())


def _interfaces(facts: Facts) -> _Found:
    for text in facts["network"]["problems"]:
        yield text, "Name an interface that this machine has, or unset the variable."


def _names(facts: Facts) -> _Found:
    main = facts["network"]["main_address"]
    if main is None or not _leads_nowhere(facts, main):
        return
    source = ((facts["launch"] or {}).get("sources") or {}).get("main_address", "MASTER_ADDR")
    yield (
        f"The address of rank 0, {main['name']} ({source}), {_state_of(main)}.",
        "Set MASTER_ADDR to a name or number of rank 0's node that all nodes can resolve and reach.",
    )


# ---- warnings ----


def _own_name(facts: Facts) -> _Found:
    network = facts["network"]
    own = network["own_name"]
    if _spans_nodes(facts) and not network["gloo_interface"] and _leads_nowhere(facts, own):
        yield (
            f"This machine's own name, {own['name']}, by which gloo finds its interface, {_state_of(own)}.",
            "Set GLOO_SOCKET_IFNAME to the interface that the other nodes reach.",
        )


def _leads_nowhere(facts: Facts, name: Facts) -> bool:
    """Whether other nodes do not come by this name to the machine that it has here."""
    return name["error"] is not None or (_spans_nodes(facts) and all(map(_is_loopback, name["addresses"])))


def _state_of(name: Facts) -> str:
    return f"is unknown here: {name['error']}" if name["error"] else "is this machine's own loopback"


def _spans_nodes(facts: Facts) -> bool:
    """Whether the job is known to have several nodes."""
    return ((facts["launch"] or {}).get("num_nodes") or 1) > 1


def _is_loopback(address: str) -> bool:
    number, _, _ = address.partition("%")  # behind it stands the interface, of an IPv6 address
    return ipaddress.ip_address(number).is_loopback


def _gpus(facts: Facts) -> _Found:
    torch = facts["versions"]["torch"]
    accelerators = facts["accelerators"]
    has_driver = accelerators["nvidia_driver"]
    cuda = accelerators["torch_cuda"]
    gpus = len(accelerators["gpus"])
    ranks = _local_ranks(facts)
    if has_driver and cuda is None:
        yield (
            f"This machine has NVIDIA's driver, but torch {torch} is a build without CUDA.",
            "Install the build for your CUDA version: https://pytorch.org/get-started.",
        )
    elif has_driver and gpus == 0:
        yield (
            f"NVIDIA's driver is there, but torch {torch} (CUDA {cuda}) sees no GPU.",
            "Look at `nvidia-smi` and CUDA_VISIBLE_DEVICES.",
        )
    elif 0 < gpus < ranks:
        yield (
            f"{ranks} ranks of this node, but {gpus} GPU(s) visible: measured on CPU.",
            "Let each rank see all GPUs of the node: it takes that of its local rank.",
        )
    elif gpus > 0 and not facts["backends"]["nccl"]:
        yield f"torch {torch} sees GPUs, but was built without NCCL.", "Install torch's wheel."


def _local_ranks(facts: Facts) -> int:
    """Ranks of this node; 1 where nobody says."""
    return (facts["launch"] or {}).get("local_world_size") or 1


def _shared_memory(facts: Facts) -> _Found:
    memory = facts["shared_memory"]
    if memory is None:
        yield "There is no /dev/shm: ranks of a node average over sockets.", "Mount a tmpfs at /dev/shm."
        return
    size = memory["size"] / _MIB
    free = memory["free"] / _MIB
    if size < _LEAST_SHARED_MEMORY:
        yield (
            f"/dev/shm holds {size:.0f} MiB: too little for gradients and for DataLoader workers.",
            "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm in Kubernetes.",
        )
    elif free < size / 20:
        yield (
            f"/dev/shm is full: {free:.0f} of {size:.0f} MiB are free.",
            "Remove what ended jobs have left in /dev/shm.",
        )


def _processors(facts: Facts) -> _Found:
    ranks = _local_ranks(facts)
    threads = facts["processors"]["threads_of_a_rank"]
    usable = facts["processors"]["usable"]
    if ranks == 1 or not usable:
        return
    if ranks * threads > max(ranks, usable):  # one thread each is the least that ranks can have
        fitting = max(1, usable // ranks)
        yield f"{ranks} ranks of {threads} threads share {usable} processors.", f"export OMP_NUM_THREADS={fitting}"


def _files(facts: Facts) -> _Found:
    if 0 <= facts["open_files"] < _LEAST_FILES:
        yield (
            f"A process may have {facts['open_files']} files open; DataLoader workers and sockets need more.",
            "ulimit -n 65536",
        )


def _efa(facts: Facts) -> _Found:
    launch = facts["launch"] or {}
    wants_efa = "FI_PROVIDER" in launch.get("will_set", {})
    if wants_efa and not facts["network"]["rdma_devices"]:
        yield (
            f"This is a {launch['instance_type']}, but no EFA device is visible: NCCL would use TCP.",
            "Use an image with EFA, and a security group that allows all traffic within itself.",
        )


def _measured(measured: Facts) -> Iterator[Finding]:
    for name, problem in measured["problems"].items():
        yield Finding(
            "error",
            f"The all-reduce by {name} failed: {problem}.",
            "Training would give wrong numbers. On GPUs look at the driver, and at NCCL: NCCL_DEBUG=INFO says what it "
            "does, NCCL_P2P_DISABLE=1 leaves out the direct way between GPUs.",
        )
    for note in measured["notes"]:
        what = note[0].upper() + note[1:].rstrip(".") + "."
        yield Finding("warning", what, "Ranks of a node average through the backend instead.")


_Look = Callable[[Facts], _Found]
_ERRORS: tuple[_Look, ...] = (_launcher, _interfaces, _names)
_WARNINGS: tuple[_Look, ...] = (_own_name, _gpus, _shared_memory, _processors, _files, _efa)
