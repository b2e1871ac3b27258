"""What memory there is on devices and hosts, and what messages between them cost: the same answer on every rank.

Ranks that decide by it do the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.round_trips import round_trips
from lightning_smddp.communication.topology import node_identity
from lightning_smddp.pipeline.partition.mesh import named_tensors
from lightning_smddp.planner.problem import Link
from lightning_smddp.wire.gather import all_agree, gather_json

_MARGIN = 1.05  # times the module's bytes, for what a host needs besides
_GROUPS = Path("/sys/fs/cgroup")

# Ranks of one host without devices: the cores that compute also copy, and a measurement would tell how busy they are.
LOOPBACK = Link(latency_s=1e-4, bytes_per_s=2e9)
_FREE = Link(latency_s=0.0, bytes_per_s=math.inf, unhidden=0.0)
_ROUNDS = 5  # of messages of each size, of which the fastest counts
_DEVICE_BYTES = 8 * 2**20  # fast links need large messages
_HOST_BYTES = 2**18  # 2 ms at 1 Gbit/s


def available_host_bytes() -> float:
    """What this process may still take of its host's memory, of its container's if that is less; inf if unknown."""
    found = math.inf
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):  # "MemAvailable:  123 kB"
                found = 1024.0 * int(line.split()[1])
                break
    with suppress(OSError, ValueError):  # "max" is no limit
        limit = int((_GROUPS / "memory.max").read_text())
        used = int((_GROUPS / "memory.current").read_text())
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
    size = sum(map(_bytes_of, module.parameters()))
    fits = 2 * size <= free_device_bytes(device)
    return all_agree(fits, group, device)


def fits_on_hosts(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of each host can have the whole ``module`` there. Collective over ``group``, all ranks."""
    needed = 0
    for tensor in named_tensors(module).values():
        if tensor.device.type != "cpu":
            needed += _bytes_of(tensor)
    # Ranks of one host are told by its identity: what they need adds up, and each may have found another rest.
    wanted: dict[str, float] = defaultdict(float)
    available: dict[str, float] = defaultdict(lambda: math.inf)
    mine = [node_identity(), needed, available_host_bytes()]
    for host, size, free in gather_json(mine, group, device):
        wanted[host] += size
        available[host] = min(available[host], free)
    return all(_MARGIN * wanted[host] <= available[host] for host in wanted)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


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
    group: dist.ProcessGroup,
    rank_of_stage: Sequence[int],
    device: torch.device,
    world: dist.ProcessGroup,
) -> tuple[Link, ...]:
    """The link between each stage and the next; of several pipelines the slowest. Collective over ``world``.

    Takes some milliseconds, however many ranks there are; nothing on one host without devices but a small message.

    Args:
        group: the ranks of this pipeline.
        rank_of_stage: rank in ``group`` of each stage.
        device: where the messages are.
        world: all ranks, the same stages in each pipeline.
    """
    boundaries = list(pairwise(rank_of_stage))
    if not boundaries:
        return ()
    # Only pairs of neighbours are measured, each pair by itself. The order is the same on all ranks, so that no two
    # wait for each other in a circle.
    hosts = gather_json(node_identity(), group, device)
    found: dict[tuple[int, int], Link | None] = {}
    for pair in _in_order(boundaries):
        found[pair] = _link(pair, hosts, group, device)
    # Each boundary was measured by both its ends, in every pipeline. One MAX over all ranks: the largest latency, and
    # of the rates, which are negated, the smallest.
    numbers = []
    for pair in boundaries:
        link = found.get(_sorted(pair)) or _FREE  # between stages of one rank, or of other ranks
        numbers.append([link.latency_s, -link.bytes_per_s, link.unhidden])
    slowest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=world)
    links = []
    for latency, rate, unhidden in slowest.tolist():
        links.append(Link(latency, -rate, unhidden))
    return tuple(links)


def _sorted(pair: tuple[int, int]) -> tuple[int, int]:
    return min(pair), max(pair)


def _in_order(boundaries: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of ranks, those next to each other in two halves that are busy at the same time."""
    # With 4 ranks in a row: 0-1 and 2-3 together, as they have no rank in common, then 1-2.
    pairs = {_sorted(pair) for pair in boundaries if pair[0] != pair[1]}
    return sorted(pairs, key=lambda pair: (pair[0] % 2, pair))


def _link(
    pair: tuple[int, int],
    hosts: Sequence[str],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Link | None:
    """What the two ranks of ``pair`` know of their link, None on others."""
    rank = group.rank()
    if rank not in pair:
        return None
    on_cpus = device.type == "cpu"
    is_one_host = hosts[pair[0]] == hosts[pair[1]]
    if on_cpus and is_one_host:
        return LOOPBACK
    other = sum(pair) - rank
    size = _DEVICE_BYTES
    if on_cpus:
        size = _HOST_BYTES
    # Messages there and back: half of a small one's time is the latency, and what a large one takes longer is the time
    # of its bytes, twice. A difference that is lost in noise is taken for a tenth of the time at least.
    small = torch.zeros(1, device=device)
    large = torch.zeros(size // 4, device=device)  # of 4 bytes each
    small_s = round_trips(group, small, other, _ROUNDS)[0]
    large_s = round_trips(group, large, other, _ROUNDS)[0]
    rate = 2 * size / max(large_s - small_s, 0.1 * large_s)
    latency = small_s / 2
    unhidden = 0.0
    if on_cpus:  # between hosts the cores copy as inside one, the network does the rest
        seconds = latency + size / rate
        unhidden = min(1.0, LOOPBACK.seconds(size) / seconds)
    return Link(latency, rate, unhidden)
