"""The end of a run: a divided module is made whole again, or stays in parts and says why."""

from __future__ import annotations

import warnings
import weakref

import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.pipeline.partition.room import fits_on_hosts
from lightning_smddp.pipeline.state.full_state import gather_full
from lightning_smddp.wire.stream import CPU

BY_EXCEPTION = "an exception ended the run that had divided it, and other ranks may have been gone"
_BY_MEMORY = "a host of the run that had divided it had too little memory for the whole of it on each of its ranks"

_in_parts: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # why


def leave_in_parts(module: nn.Module, reason: str) -> None:
    """Remember that this rank has its own stages of ``module`` only."""
    _in_parts[module] = reason


def require_whole(module: nn.Module) -> None:
    """Raise ``ValueError`` if an earlier run has left ``module`` in parts, of which this rank has its own."""
    if module in _in_parts and any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} is in parts: {_in_parts[module]}, so that this rank has its own stages only. "
            "Make a new module, and give `fit` the last checkpoint as `ckpt_path`."
        )


def made_whole(divided: PartitionedModule, device: torch.device) -> bool:
    """Give every rank the whole module on its host, where it goes after a run in any case. Collective over all ranks.

    Returns:
        False if a host lacks memory for that: then the parts stay on their ranks, with a warning.
    """
    world = dist.group.WORLD
    assert world is not None
    module = divided.module
    if fits_on_hosts(module, world, device):
        divided.view.close()
        divided.hooks.take(dict(module.named_parameters()))  # also of absent ones, which lose them
        gather_full(module, divided.division.ownership, divided.groups.pipeline, device, to=CPU)
        divided.hooks.give_back()
        return True
    leave_in_parts(module, _BY_MEMORY)
    if dist.get_rank() == 0:
        warnings.warn(f"{type(module).__name__} stays in parts, each on its rank: {_BY_MEMORY}.", stacklevel=2)
    return False
