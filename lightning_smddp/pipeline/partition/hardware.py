"""What memory there is on devices and hosts, and what messages between them cost: the same answer on every rank.

Ranks that decide by it do the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication.round_trips import round_trips
from lightning_smddp.communication.topology import node_identity
from lightning_smddp.pipeline.partition.mesh import named_tensors
from lightning_smddp.planner.problem import Link
from lightning_smddp.wire.gather import all_agree, gather_json

_MARGIN = 1.05
_GROUPS = Path("/sys/fs/cgroup")

# Ranks of one host without devices: the cores that compute also copy, and a measurement would tell how busy they are.
LOOPBACK = Link(latency_s=1e-4, bytes_per_s=2e9)
_FREE = Link(latency_s=0.0, bytes_per_s=math.inf, unhidden=0.0)
_ROUNDS = 5
_DEVICE_BYTES = 8 * 2**20  # fast links need large messages
_HOST_BYTES = 2**18  # 2 ms at 1 Gbit/s


def available_host_bytes() -> float:
    """What this process may still take of its host's memory, of its container's if that is less; inf if unknown."""
    found = math.inf
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))  # "MemAvailable:  123 kB"
        found = 1024.0 * int(available.split()[1])
    with suppress(OSError, ValueError):  # "max" is no limit
        limit, used = (int((_GROUPS / name).read_text()) for name in ("memory.max", "memory.current"))
        found = min(found, max(0, limit - used))
    return found


def free_device_bytes(device: torch.device) -> float:
    """Of a CUDA device; inf for others."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.mem_get_info(device)[0]


def fits_on_devices(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank's device has room for all of ``module``. Collective over ``group``, all ranks.

    As much again is for the trace, and for the gradients of its last modules.
    """
    size = sum(parameter.numel() * parameter.dtype.itemsize for parameter in module.parameters())
    return all_agree(2 * size <= free_device_bytes(device), group, device)


def fits_on_hosts(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of each host can have the whole ``module`` there. Collective over ``group``, all ranks."""
    elsewhere = [tensor for tensor in named_tensors(module).values() if tensor.device.type != "cpu"]
    needed = sum(tensor.numel() * tensor.dtype.itemsize for tensor in elsewhere)
    wanted: dict[str, float] = defaultdict(float)
    available: dict[str, float] = defaultdict(lambda: math.inf)
    for host, size, free in gather_json([node_identity(), needed, available_host_bytes()], group, device):
        wanted[host] += size
        available[host] = min(available[host], free)
    return all(_MARGIN * wanted[host] <= available[host] for host in wanted)


@contextmanager
def explained_shortage(is_whole: bool) -> Iterator[None]:
    """Around a run of the training step on one device: where that is out of memory, the error says what to do.

    Args:
        is_whole: whether the device holds the whole model.

    Raises:
        torch.OutOfMemoryError: as it came, with the cure.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        cure = "More micro-batches (`num_microbatches=`) make each of them smaller."
        if is_whole:
            cure = (
                "The whole model is on each device then. With `PipelineStrategy(meta_init=True)` and layers made in "
                f"`configure_model` it never is. {cure}"
            )
        raise torch.OutOfMemoryError(
            f"{error} This was a run of the step on one micro-batch, by which a pipeline is planned. {cure}"
        ) from error


def find_links(
    group: dist.ProcessGroup, rank_of_stage: Sequence[int], device: torch.device, world: dist.ProcessGroup
) -> tuple[Link, ...]:
    """The link between each stage and the next; of several pipelines the slowest. Collective over ``world``.

    Takes some milliseconds, however many ranks there are; nothing on one host without devices but a small message.

    Args:
        group: the ranks of this pipeline.
        rank_of_stage: rank in ``group`` of each stage.
        device: where the messages are.
        world: all ranks, the same stages in each pipeline.
    """
    boundaries = list(zip(rank_of_stage, rank_of_stage[1:], strict=False))
    if not boundaries:
        return ()
    hosts = gather_json(node_identity(), group, device)
    found = {pair: _link(pair, hosts, group, device) for pair in _in_order(boundaries)}
    known_here = [found.get(_sorted(pair)) or _FREE for pair in boundaries]
    # Each boundary was measured by both its ends, in every pipeline. One MAX over all ranks: the largest latency, and
    # of the rates, which are negated, the smallest.
    numbers = [[link.latency_s, -link.bytes_per_s, link.unhidden] for link in known_here]
    slowest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=world)
    return tuple(Link(latency, -rate, unhidden) for latency, rate, unhidden in slowest.tolist())


def _sorted(pair: tuple[int, int]) -> tuple[int, int]:
    return min(pair), max(pair)


def _in_order(boundaries: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of ranks, those next to each other in two halves that are busy at the same time."""
    pairs = {_sorted(pair) for pair in boundaries if pair[0] != pair[1]}
    return sorted(pairs, key=lambda pair: (pair[0] % 2, pair))


def _link(pair: tuple[int, int], hosts: Sequence[str], group: dist.ProcessGroup, device: torch.device) -> Link | None:
    """What the two ranks of ``pair`` know of their link, None on others."""
    rank = group.rank()
    if rank not in pair:
        return None
    is_one_host = hosts[pair[0]] == hosts[pair[1]]
    if device.type == "cpu" and is_one_host:
        return LOOPBACK
    (other,) = set(pair) - {rank}
    size = _HOST_BYTES
    if device.type != "cpu":
        size = _DEVICE_BYTES
    small = round_trips(group, torch.zeros(1, device=device), other, _ROUNDS)[0]
    large = round_trips(group, torch.zeros(size // 4, device=device), other, _ROUNDS)[0]
    rate = 2 * size / max(large - small, 0.1 * large)
    latency = small / 2
    unhidden = 0.0
    if device.type == "cpu":  # between hosts the cores copy as inside one, the network does the rest
        unhidden = min(1.0, LOOPBACK.seconds(size) / (latency + size / rate))
    return Link(latency, rate, unhidden)
