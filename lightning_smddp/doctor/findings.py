"""What is wrong, and the cure: plain functions of :func:`~lightning_smddp.doctor.facts.look`'s facts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_GIB = 2**30
_LEAST_SHARED_MEMORY = _GIB
_LEAST_FILES = 1024
_SLOW_LINK = 3.0  # times slower than the others
_MALICIOUS = ("2.6.2", "2.6.3")
_Found = Iterator[tuple[str, str]]


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

    def to_json(self) -> list[Any]:
        """As JSON carries it between ranks."""
        return [self.level, self.what, self.cure, list(self.hosts)]

    @classmethod
    def from_json(cls, values: list[Any]) -> Finding:
        """The inverse of :meth:`to_json`."""
        level, what, cure, hosts = values
        return cls(level, what, cure, tuple(hosts))


def find(facts: Mapping[str, Any], measured: Mapping[str, Any] | None = None) -> list[Finding]:
    """What is wrong with a host by its facts, and with the paths and links between hosts as measured; errors first."""
    hosts = (str(facts["host"]),)
    found = []
    for level, look in _LOOKS:
        found += [Finding(level, what, cure, hosts) for what, cure in look(facts)]
    found += [Finding("error", what, cure) for what, cure in _paths(measured or {})]
    found += [Finding("warning", what, cure) for what, cure in _links(measured or {})]
    return sorted(found, key=lambda finding: finding.level)


def merged(findings: list[Finding]) -> list[Finding]:
    """The same one of several hosts is one."""
    hosts: dict[tuple[Any, str, str], dict[str, None]] = {}
    for finding in findings:
        key = (finding.level, finding.what, finding.cure)
        known = hosts.setdefault(key, {})
        known.update(dict.fromkeys(finding.hosts))
    found = [Finding(*key, tuple(where)) for key, where in hosts.items()]
    return sorted(found, key=lambda finding: finding.level)


# ---- errors ----


def _launcher(facts: Mapping[str, Any]) -> _Found:
    if facts["launch_problem"] is not None:
        yield facts["launch_problem"], "Start the job as docs/launchers.md shows."
    yield from (facts["launch"] or {}).get("problems", ())


def _versions(facts: Mapping[str, Any]) -> _Found:
    versions = facts["versions"]
    present = {name: versions[name] for name in ("lightning", "pytorch-lightning") if versions[name] is not None}
    if not present:
        yield "Neither lightning nor pytorch-lightning is installed.", "pip install 'lightning>=2.6,!=2.6.2,!=2.6.3'"
    for name, least in (*((name, (2, 6)) for name in present), ("torch", (2, 11))):
        if _release(versions[name]) < least:
            wanted = ".".join(map(str, least))
            yield f"{name} is {versions[name]}, older than this package works with.", f"pip install '{name}>={wanted}'"
    for name, version in present.items():
        if version in _MALICIOUS:
            yield (
                f"{name} {version} is a malicious upload, not a release of the Lightning team.",
                f"Take this machine's credentials for stolen, and pip install '{name}!={'!='.join(_MALICIOUS)}'",
            )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _backends(facts: Mapping[str, Any]) -> _Found:
    if not facts["backends"]["gloo"]:
        yield "torch was built without gloo, which ranks on CPU need.", "Install torch's wheel."


def _interfaces(facts: Mapping[str, Any]) -> _Found:
    for text in facts["network"]["problems"]:
        yield text, "Name an interface that this machine has, or unset the variable."


def _names(facts: Mapping[str, Any]) -> _Found:
    launch, network = facts["launch"] or {}, facts["network"]
    main, spans = network["main_address"], (launch.get("num_nodes") or 1) > 1
    source = launch.get("sources", {}).get("main_address", "MASTER_ADDR")
    if main is not None and main["error"] is not None:
        yield (
            f"The address of rank 0, {main['name']} ({source}), is unknown here: {main['error']}.",
            ("Set MASTER_ADDR to a name or number that all nodes can resolve."),
        )
    elif main is not None and spans and all(map(_is_loopback, main["addresses"])):
        yield (
            f"The address of rank 0, {main['name']} ({source}), is this machine's own loopback.",
            ("Set MASTER_ADDR to an address of rank 0's node that the other nodes reach."),
        )


# ---- warnings ----


def _own_name(facts: Mapping[str, Any]) -> _Found:
    launch, network = facts["launch"] or {}, facts["network"]
    own = network["own_name"]
    if (launch.get("num_nodes") or 1) > 1 and not network["gloo_interface"]:
        if own["error"] is not None:
            yield (
                f"This machine cannot resolve its own name, {own['name']}, by which gloo finds its interface.",
                ("Set GLOO_SOCKET_IFNAME to the interface that the other nodes reach."),
            )
        elif all(map(_is_loopback, own["addresses"])):
            yield (
                f"This machine's name, {own['name']}, stands for its loopback, where gloo would listen.",
                ("Set GLOO_SOCKET_IFNAME to the interface that the other nodes reach."),
            )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _gpus(facts: Mapping[str, Any]) -> _Found:
    accelerators, torch = facts["accelerators"], facts["versions"]["torch"]
    ranks = _local_ranks(facts)
    if accelerators["nvidia_driver"] and accelerators["torch_cuda"] is None:
        yield (
            f"This machine has NVIDIA's driver, but torch {torch} is a build without CUDA.",
            ("Install the build for your CUDA version: https://pytorch.org/get-started."),
        )
    elif accelerators["nvidia_driver"] and not accelerators["gpus"]:
        yield (
            f"NVIDIA's driver is there, but torch {torch} (CUDA {accelerators['torch_cuda']}) sees no GPU.",
            ("Look at `nvidia-smi` and CUDA_VISIBLE_DEVICES."),
        )
    elif accelerators["gpus"] and len(accelerators["gpus"]) < ranks:
        yield (
            f"{ranks} ranks of this node, but {len(accelerators['gpus'])} GPU(s) visible: measured on CPU.",
            ("Let each rank see all GPUs of the node: it takes that of its local rank."),
        )
    elif accelerators["gpus"] and not facts["backends"]["nccl"]:
        yield f"torch {torch} sees GPUs, but was built without NCCL.", "Install torch's wheel."


def _local_ranks(facts: Mapping[str, Any]) -> int:
    """Ranks of this node; 1 where nobody says."""
    launch = facts["launch"] or {}
    ranks: int = launch.get("local_world_size") or 1
    return ranks


def _shared_memory(facts: Mapping[str, Any]) -> _Found:
    memory = facts["shared_memory"]
    if memory is None:
        yield "There is no /dev/shm: ranks of a node average over sockets.", "Mount a tmpfs at /dev/shm."
    elif memory["size"] < _LEAST_SHARED_MEMORY:
        yield (
            f"/dev/shm holds {memory['size'] / 2**20:.0f} MiB: too little for gradients and for DataLoader workers.",
            "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm in Kubernetes.",
        )
    elif memory["free"] < memory["size"] / 20:
        yield (
            f"/dev/shm is full: {memory['free'] / 2**20:.0f} of {memory['size'] / 2**20:.0f} MiB are free.",
            ("Remove what ended jobs have left in /dev/shm."),
        )


def _processors(facts: Mapping[str, Any]) -> _Found:
    processors, ranks = facts["processors"], _local_ranks(facts)
    threads, usable = processors["threads_of_a_rank"], processors["usable"]
    if ranks > 1 and usable and ranks * threads > max(ranks, usable):
        yield (
            f"{ranks} ranks of {threads} threads share {usable} processors.",
            (f"export OMP_NUM_THREADS={max(1, usable // ranks)}"),
        )


def _files(facts: Mapping[str, Any]) -> _Found:
    if 0 <= facts["open_files"] < _LEAST_FILES:
        yield (
            f"A process may have {facts['open_files']} files open; DataLoader workers and sockets need more.",
            ("ulimit -n 65536"),
        )


def _pidfds(facts: Mapping[str, Any]) -> _Found:
    if not facts["sees_processes_end"]:
        yield (
            "This kernel or Python has no pidfds: a dead rank is noticed by its connection, without the cause.",
            ("Linux 5.3 and Python 3.9 have them; some sandboxes leave them out."),
        )


def _mpi(facts: Mapping[str, Any]) -> _Found:
    if facts["versions"]["mpi4py"] is not None and facts["mpi_library"] is None:
        yield (
            "mpi4py is installed, but no MPI library is found by name: it may not load.",
            "Nothing here needs mpi4py. If `python -c 'from mpi4py import MPI'` fails, uninstall it or install MPI.",
        )


def _efa(facts: Mapping[str, Any]) -> _Found:
    wants = "FI_PROVIDER" in (facts["launch"] or {}).get("will_set", {})
    if wants and not facts["network"]["rdma_devices"]:
        yield (
            f"This is a {facts['launch']['instance_type']}, but no EFA device is visible: NCCL would use TCP.",
            ("Use an image with EFA, and a security group that allows all traffic within itself."),
        )


def _paths(measured: Mapping[str, Any]) -> _Found:
    for what, problem in measured.get("paths", {}).items():
        if problem is not None:
            yield (
                f"The self-test of {what} failed: {problem}.",
                "Training would give wrong numbers. On GPUs look at the driver, and at NCCL: NCCL_DEBUG=INFO says what "
                "it does, NCCL_P2P_DISABLE=1 leaves out the direct way between GPUs.",
            )


def _links(measured: Mapping[str, Any]) -> _Found:
    links = measured.get("links", [])
    if len(links) > 1:
        usual = _usual_speed(links)
        for link in links:
            speed = link["gigabytes_per_s"]
            if speed * _SLOW_LINK < usual:
                yield (
                    f"The link to {link['host']} carries {speed:.2f} GB/s, others {usual:.2f}.",
                    ("Look at that host's network; a job is as fast as its slowest link."),
                )
    neighbours = measured.get("neighbours", [])
    if len(neighbours) > 2 and len(measured.get("nodes", [])) == 1:
        usual = _usual_speed(neighbours)
        for link in neighbours:
            speed = link["gigabytes_per_s"]
            if speed * _SLOW_LINK < usual:
                first, second = link["ranks"]
                yield (
                    f"The link between ranks {first} and {second} carries {speed:.2f} GB/s, "
                    f"others of this node {usual:.2f}.",
                    "On GPUs `nvidia-smi topo -m` shows how they are connected.",
                )
    for note in measured.get("notes", []):
        yield f"{note[0].upper()}{note[1:].rstrip('.')}.", "Ranks of a node average through the backend instead."


def _usual_speed(links: Sequence[Mapping[str, Any]]) -> float:
    """The median, in gigabytes per second."""
    speeds = sorted(link["gigabytes_per_s"] for link in links)
    usual: float = speeds[len(links) // 2]
    return usual


_LOOKS: list[tuple[Literal["error", "warning"], Callable[[Mapping[str, Any]], _Found]]] = [
    ("error", _launcher), ("error", _versions), ("error", _backends), ("error", _interfaces), ("error", _names),
    ("warning", _own_name), ("warning", _gpus), ("warning", _shared_memory), ("warning", _processors),
    ("warning", _files), ("warning", _pidfds), ("warning", _mpi), ("warning", _efa),
]  # fmt: skip
