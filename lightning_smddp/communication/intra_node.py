"""Ranks of one node reduce through the backend's collectives: GPUs, and CPUs without shared memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat.torch import all_gather_single, reduce_scatter_single
from lightning_smddp.communication.shared_memory import sum_dtype


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

    def reduce_scatter(self, tensor: Tensor, slot: int, scale: float) -> Tensor:
        """``scale`` times the sum of this rank's shard over the local ranks, in ``tensor`` itself."""
        shard, width = self._shard(tensor)
        sent = _padded(tensor, width * self.size)
        if tensor.is_cuda:
            if tensor.dtype == torch.float16:
                # NCCL sums fp16 in fp16, and the sum may overflow where the mean does not: so scale before.
                sent = sent * scale
                scale = 1.0
            received = sent.new_empty(width)
            reduce_scatter_single(received, sent, group=self.group)
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

    def all_gather(self, tensor: Tensor, slot: int) -> None:
        """This rank's shard of ``tensor`` goes into all local ranks' tensors."""
        shard, width = self._shard(tensor)
        if width * self.size == tensor.numel():
            # The output is the whole tensor, of which the shard is a part: the input has to be other memory.
            all_gather_single(tensor, shard.clone(), self.group)
            return
        gathered = tensor.new_empty(width * self.size)
        all_gather_single(gathered, _padded(shard, width), self.group)
        tensor.copy_(gathered[: tensor.numel()])

    def _shard(self, tensor: Tensor) -> tuple[Tensor, int]:
        """This rank's, and how long one is; the last may be shorter, those of ranks behind ``num_shards`` are empty."""
        # 5 elements in 2 shards, of 3 ranks: | 0 1 2 | 3 4 |   |, which collectives get as | 0 1 2 | 3 4 - | - - - |
        width = max(1, -(-tensor.numel() // self.num_shards))
        return tensor[self.rank * width : (self.rank + 1) * width], width

    def close(self) -> None:
        """Nothing to free: the group belongs to the caller."""


def _padded(tensor: Tensor, numel: int) -> Tensor:
    """``tensor`` with zeros behind it, up to ``numel`` elements; itself if it needs none."""
    missing = numel - tensor.numel()
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
