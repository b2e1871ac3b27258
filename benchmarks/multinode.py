"""All-reduce over a slow network: two nodes of two ranks, on one machine.

A node is a network namespace; a pair of virtual interfaces with a rate limit at both ends joins the two. Traffic
between the ranks of a node stays on its loopback interface. Needs root, `ip` and `tc`; skips itself otherwise.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import Record, Stats, interleave, launch, parser, relative_error, table, target

MIB = 2**20
NODES, RANKS = 2, 4
ORDERS = {"contiguous": [0, 0, 1, 1], "interleaved": [0, 1, 0, 1]}  # the node of each rank
PAYLOAD = 1448 / 1514  # of a full Ethernet frame as the rate limit counts it: 1500 bytes and its header
FLAT, EXACT = "gloo, flat", "hierarchical"
# arm: algorithm, compression, largest relative error
ARMS = {
    EXACT: ("hierarchical", None, 1e-6),
    "balanced": ("balanced", None, 1e-6),
    "hierarchical, bf16": ("hierarchical", "bf16", 1e-2),
    "hierarchical, int8": ("hierarchical", "int8", 3e-2),
    "flat, bf16": ("native", "bf16", 1e-2),
}


def main() -> None:
    """Run, print, record."""
    options = parser(__doc__)
    options.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0], help="rates of the link, Gbit/s")
    options.add_argument("--mib", type=int, nargs="+", default=[8, 32], help="sizes of the tensor")
    options.add_argument("--rounds", type=int, default=8, help="turns of each arm in a launch")
    options.add_argument("--launches", type=int, default=3, help="of each rank order, in alternation")
    args = options.parse_args()
    if args.quick:
        args.mib, args.rounds, args.launches = [8], 3, 1
    reason = _missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    record = Record(
        "multinode",
        "All-reduce (mean) of fp32 gradients over 2 nodes of 2 ranks",
        args,
        "the network. An exact hierarchical all-reduce of S bytes over m nodes sends 2(m-1)/m S bytes out of each node,"
        f" here S, at the link's rate less what headers take ({PAYLOAD:.1%} is payload). *Of wire* is that time over "
        "the median; arms that compress may exceed 1. All ranks share this machine's CPUs, which at high rates limit "
        "before the wire does.",
    )
    # Launches of both rank orders alternate, so that a slow minute of the machine falls on both.
    runs: dict[tuple[float, str], list[Any]] = {(rate, order): [] for rate in args.gbit for order in ORDERS}
    with _two_nodes() as (namespaces, interfaces):
        for _ in range(args.launches):
            for rate, order in runs:
                _limit(namespaces, interfaces, rate)
                runs[rate, order].append(_launch(namespaces, interfaces, order, args.mib, args.rounds))
    _report(record, args, runs)
    record.finish()


def _report(record: Record, args: Any, runs: dict[tuple[float, str], list[Any]]) -> None:
    stats = {
        (rate, order, mib): {arm: Stats.of(*(run[str(mib)][arm] for run in launches)) for arm in [FLAT, *ARMS]}
        for (rate, order), launches in runs.items()
        for mib in args.mib
    }
    record.data["cases"] = [
        {"gbit": rate, "order": order, "mib": mib, "stats": {arm: vars(s) for arm, s in arms.items()}}
        for (rate, order, mib), arms in stats.items()
    ]
    targets = []
    for (rate, order, mib), arms in stats.items():
        ideal_ms = 1e3 * mib * MIB / (rate * 1e9 / 8 * PAYLOAD)
        flat = arms[FLAT]
        rows = [
            [arm, s.best, s.median, s.cpu, flat.best / s.best, flat.median / s.median, flat.cpu / s.cpu,
             ideal_ms / s.median]
            for arm, s in arms.items()
        ]  # fmt: skip
        headings = ["arm", "best ms", "median ms", "cpu ms", "x flat, best", "x flat, median", "x flat, cpu", "of wire"]
        repeats = f"{flat.repeats} repeats; the wire allows {ideal_ms:.1f} ms."
        record.section(f"{rate:g} Gbit/s, {mib} MiB, {order} ranks", table(headings, rows), repeats)
        label = f"{rate:g} Gbit/s, {mib} MiB"
        if order == "contiguous":
            half = arms["hierarchical, bf16"].median / arms[EXACT].median
            if rate == 1:
                targets.append(target(f"{label}, {EXACT}, of wire", ideal_ms / arms[EXACT].median, 0.85, True))
                targets.append(target(f"{label}, bf16 / exact", half, 0.6, False))
            other = stats[rate, "interleaved", mib]
            slower = other[EXACT].median / arms[EXACT].median
            targets.append(target(f"{label}, {EXACT}, interleaved / contiguous", slower, 1.05, False))
    record.section("Targets", "\n".join(targets))


def _missing() -> str | None:
    """Why namespaces cannot be made here, or None."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (package iproute2)"
    name = f"bench{os.getpid()}t"
    trial = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if trial.returncode:
        return f"network namespaces are not permitted ({trial.stderr.strip()})"
    try:
        command = [
            "tc",
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "tbf",
            "rate",
            "1gbit",
            "burst",
            "128kb",
            "latency",
            "20ms",
        ]
        trial = subprocess.run(["ip", "netns", "exec", name, *command], capture_output=True, text=True)
        return f"rates cannot be limited ({trial.stderr.strip()})" if trial.returncode else None
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@contextmanager
def _two_nodes() -> Iterator[tuple[list[str], list[str]]]:
    """Two namespaces joined by a pair of interfaces: their names. Both are gone afterwards."""
    names = [f"bench{os.getpid()}{node}" for node in "ab"]
    interfaces = [f"veth{os.getpid()}{node}" for node in "ab"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that `finally` runs
    made = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        first, second = interfaces
        _run("ip", "link", "add", first, "netns", names[0], "type", "veth", "peer", "name", second, "netns", names[1])
        for node, (name, interface) in enumerate(zip(names, interfaces, strict=True)):
            _run("ip", "-n", name, "address", "add", f"10.203.0.{node + 1}/24", "dev", interface)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", interface, "up")
        yield names, interfaces
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _limit(namespaces: list[str], interfaces: list[str], gbit: float) -> None:
    for name, interface in zip(namespaces, interfaces, strict=True):
        _run("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", *_shaper(gbit))


def _shaper(gbit: float) -> list[str]:
    return ["tbf", "rate", f"{int(gbit * 1000)}mbit", "burst", "128kb", "latency", "20ms"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _launch(namespaces: list[str], interfaces: list[str], order: str, mib: list[int], rounds: int) -> Any:
    prefixes = [
        ["ip", "netns", "exec", namespaces[node], "env", f"GLOO_SOCKET_IFNAME={interfaces[node]}"]
        for node in ORDERS[order]
    ]
    return launch("multinode:rank_main", RANKS, {"mib": mib, "rounds": rounds}, prefixes=prefixes)


def rank_main(mib: list[int], rounds: int) -> dict[int, Any]:
    """Samples by size and arm."""
    from lightning_smddp.communication.communicator import Communicator, reduce_once
    from lightning_smddp.communication.compression import Compression

    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    communicator = Communicator(group, torch.device("cpu"), timedelta(minutes=5))
    assert communicator.topology.num_nodes == NODES, communicator.topology
    assert communicator.shared_memory_refusal is None, communicator.shared_memory_refusal
    algorithms = {
        arm: communicator.algorithm(name, Compression.parse(compression))
        for arm, (name, compression, _) in ARMS.items()
    }
    results = {}
    for slot, size in enumerate(mib):
        numel = size * MIB // 4
        inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
        expected = torch.stack(inputs).mean(0)
        tensors = {arm: inputs[rank].clone() for arm in [FLAT, *ARMS]}
        arms: dict[str, Any] = {FLAT: lambda t=tensors[FLAT]: (dist.all_reduce(t), t.div_(RANKS))}
        for arm, algorithm in algorithms.items():
            arms[arm] = lambda a=algorithm, t=tensors[arm], s=slot: reduce_once(a, t, s)
        for arm, call in arms.items():
            call()
            error, limit = relative_error(tensors[arm], expected), ARMS[arm][2] if arm in ARMS else 1e-6
            assert error < limit, f"{arm} differs from the reference by {error:.1e}"
        results[size] = interleave(arms, rounds, warmup=1)
    for algorithm in algorithms.values():
        algorithm.close()
    communicator.close()
    return results


if __name__ == "__main__":
    main()
