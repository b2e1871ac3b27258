"""How long messages take between two ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor


def round_trips(group: dist.ProcessGroup, tensor: Tensor, other: int, count: int) -> list[float]:
    """Seconds that ``tensor`` takes to the rank ``other`` of ``group`` and back, ``count`` times, ascending.

    Both ranks call it, each with the other's number; one more round before them opens the connection.
    """
    first = dist.get_rank(group) < other
    samples = []
    for _ in range(count + 1):
        begin = time.perf_counter()
        for sends in (first, not first):
            if sends:
                dist.send(tensor, group=group, group_dst=other)
            else:
                dist.recv(tensor, group=group, group_src=other)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        samples.append(time.perf_counter() - begin)
    return sorted(samples[1:])
