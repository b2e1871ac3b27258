"""Ranks of one node reduce through the backend's collectives: GPUs, and CPUs without shared memory."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat.torch import all_gather_single, reduce_scatter_single
from lightning_smddp.communication.shared_memory import sum_dtype
from lightning_smddp.communication.topology import local_shard_bounds


class IntraNodeGroup:
    """The same operations as ``SharedMemory``, over a process group of the node's ranks.

    gloo's reduce-scatter is an all-reduce in disguise (clone, full all-reduce, slice), so there the parts are sent
    to their owners by an all-to-all and summed here.
    """

    def __init__(self, group: dist.ProcessGroup, num_shards: int) -> None:
        self.group = group
        self.num_shards = num_shards
        self.rank = group.rank()
        self.size = dist.get_world_size(group)

    def bounds(self, numel: int) -> list[int]:
        """Bounds of all local ranks' shards; ranks from ``num_shards`` on own an empty one."""
        return local_shard_bounds(numel, self.num_shards, self.size)

    def reduce_scatter(self, tensor: Tensor, slot: int | None, scale: float) -> Tensor:
        """``scale`` times the sum of this rank's shard over the local ranks, in ``tensor`` itself."""
        bounds = self.bounds(tensor.numel())
        shard = self._own_shard(tensor, bounds)
        width = _width(bounds)
        sent = _padded(tensor, bounds, width)
        if tensor.is_cuda:
            if tensor.dtype == torch.float16:
                # NCCL sums fp16 in fp16, and the sum may overflow where the mean does not: so scale before.
                sent = sent * scale
                scale = 1.0
            received = sent.new_empty(width)
            reduce_scatter_single(received, sent, self.group)
        else:
            parts = torch.empty_like(sent)
            dist.all_to_all_single(parts, sent, group=self.group)
            rows = parts.view(self.size, width)  # this rank's shard, as each local rank has it
            received = rows.sum(0, dtype=sum_dtype(tensor.dtype))
        total = received[: shard.numel()]
        if scale != 1.0:
            total.mul_(scale)
        shard.copy_(total)
        return shard

    def all_gather(self, tensor: Tensor, slot: int | None) -> None:
        """This rank's shard of ``tensor`` goes into all local ranks' tensors."""
        bounds = self.bounds(tensor.numel())
        shard = self._own_shard(tensor, bounds)
        if _is_even(bounds):
            # The output is the whole tensor, of which the shard is a part: the input has to be other memory.
            all_gather_single(tensor, shard.clone(), self.group)
            return
        # The collective takes parts of one size, so each is padded to the widest shard.
        width = _width(bounds)
        own = tensor.new_zeros(width)
        own[: shard.numel()].copy_(shard)
        gathered = tensor.new_empty(width * self.size)
        all_gather_single(gathered, own, self.group)
        for rank, part in enumerate(gathered.split(width)):
            low, high = bounds[rank], bounds[rank + 1]
            tensor[low:high].copy_(part[: high - low])

    def _own_shard(self, tensor: Tensor, bounds: list[int]) -> Tensor:
        low, high = bounds[self.rank], bounds[self.rank + 1]
        return tensor[low:high]

    def close(self) -> None:
        """Nothing to free: the group belongs to the caller."""


def _width(bounds: list[int]) -> int:
    """Elements of the largest shard; 1 where all are empty."""
    width = 1
    for low, high in itertools.pairwise(bounds):
        width = max(width, high - low)
    return width


def _is_even(bounds: list[int]) -> bool:
    """Whether all shards are as large, so that nothing has to be padded."""
    num_shards = len(bounds) - 1
    return bounds[-1] == _width(bounds) * num_shards


def _padded(tensor: Tensor, bounds: list[int], width: int) -> Tensor:
    """The shards of ``tensor``, each padded with zeros to ``width`` elements; ``tensor`` itself if none needs it."""
    if _is_even(bounds):
        return tensor
    num_shards = len(bounds) - 1
    # bounds 0, 3, 5 and width 3:   | 0 1 2 | 3 4 |   ->   | 0 1 2 | 3 4 - |
    padded = tensor.new_zeros(num_shards * width)
    for rank, part in enumerate(padded.split(width)):
        low, high = bounds[rank], bounds[rank + 1]
        part[: high - low].copy_(tensor[low:high])
    return padded
