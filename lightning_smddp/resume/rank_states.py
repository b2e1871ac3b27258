"""What each rank has to say in a checkpoint, brought together without pickle."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.wire.encode import pack, unpack
from lightning_smddp.wire.gather import gather_bytes


def gather_states(state: Any, device: torch.device) -> list[Any]:
    """Every rank's ``state``, in the order of global ranks, on the first rank; an empty list on the others.

    Collective over the world, if there is one.

    Args:
        state: values of :data:`~lightning_smddp.wire.encode.FORMS`; tensors of the CPU.
        device: where the group's collectives take their tensors from.
    """
    packed = pack(state)
    if not dist.is_initialized():
        return [unpack(packed)]
    world = dist.group.WORLD
    assert world is not None
    gathered = gather_bytes(packed.to(device), world)
    if world.rank() != 0:  # what it does not write it need not decode
        return []
    return [unpack(data) for data in gathered]
