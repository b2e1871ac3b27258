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

from lightning_smddp.communication.topology import node_identity
from lightning_smddp.pipeline.mesh import named_tensors
from lightning_smddp.planner.problem import Link
from lightning_smddp.wire.objects import gather

_MARGIN = 1.05  # times the module's bytes, for what a host needs besides
_GROUPS = Path("/sys/fs/cgroup")

# What messages cost is taken for known, by kind: a measurement tells how busy hosts are. The cores of hosts
# without devices copy, and cannot compute meanwhile.
LOOPBACK = Link(latency_s=1e-4, bytes_per_s=2e9)
NVLINK = Link(latency_s=1e-5, bytes_per_s=100e9, unhidden=0.0)
NETWORK = Link(latency_s=1e-4, bytes_per_s=3e9, unhidden=0.0)
WITHIN_RANK = Link(latency_s=0.0, bytes_per_s=math.inf, unhidden=0.0)


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
    return all(gather(fits, group))


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
    for host, size, free in gather(mine, group):
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


def links_between(
    rank_of_stage: Sequence[int],
    pipelines: Sequence[Sequence[int]],
    hosts: Sequence[str],
    device_type: str,
) -> tuple[Link, ...]:
    """The link between each stage and the next; of several pipelines the slowest.

    Args:
        rank_of_stage: rank in the pipeline of each stage.
        pipelines: for each of them its ranks.
        hosts: identity of each rank's.
        device_type: where the messages are.
    """
    links = []
    for sender, receiver in pairwise(rank_of_stage):
        if sender == receiver:
            links.append(WITHIN_RANK)
        elif device_type == "cpu":
            links.append(LOOPBACK)
        elif all(hosts[ranks[sender]] == hosts[ranks[receiver]] for ranks in pipelines):
            links.append(NVLINK)
        else:
            links.append(NETWORK)
    return tuple(links)
