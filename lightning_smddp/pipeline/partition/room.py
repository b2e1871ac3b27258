"""Whether a module has room on devices and hosts: the same answer on every rank, as they then do the same."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.communication.topology import node_identity
from lightning_smddp.pipeline.partition.ownership import named_tensors
from lightning_smddp.wire.gather import all_agree, gather_json

_MARGIN = 1.05
_GROUPS = Path("/sys/fs/cgroup")


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
