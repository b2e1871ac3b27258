"""Whether all ranks of a group have the same batch already: a checksum on each, and one small message.

Each rank of a pipeline has read its own batch. Where samplers agree, as they nearly always do, nothing need be sent.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.pipeline.structure import items


def fingerprint(value: Any) -> int | None:
    """A number that is another one for nearly every other value (CRC-32, of structure and contents).

    None where it cannot be told from the value: tensors that are not dense and on the CPU, and objects other than
    numbers, strings, booleans, arrays and None.
    """
    described: list[Any] = []
    checksum = 0
    for path, leaf in items(value):
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cpu" or leaf.layout != torch.strided:
                return None
            described.append([path, str(leaf.dtype), list(leaf.shape), leaf.requires_grad])
            data = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            checksum = zlib.crc32(data.numpy().data, checksum)
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            described.append([path, str(leaf.dtype), list(leaf.shape)])
            checksum = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, checksum)
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            described.append([path, type(leaf).__name__, leaf])
        else:
            return None
    return zlib.crc32(json.dumps(described).encode(), checksum)


def same_everywhere(value: Any, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of ``group``, whose collectives take CPU tensors, have an equal ``value``. Collective."""
    mine = fingerprint(value)
    votes = torch.tensor([int(mine is None), mine or 0, -(mine or 0)])
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    unknown, highest, lowest = votes.tolist()
    return bool(unknown == 0 and highest == -lowest)
