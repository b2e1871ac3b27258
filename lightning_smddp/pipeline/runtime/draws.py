"""Random draws of stages (dropout, noise): independent of each other, and the same where two runs are compared.

All ranks begin with the same seed. What no seed resets is the dropout of cuDNN's recurrent layers on CUDA, which draws
from a state of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.wire.gather import gather_json


@contextmanager
def without_own_dropout(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it such modules of ``root`` drop nothing, so that two runs with the same seed are alike."""
    found: list[nn.RNNBase] = []
    if device.type == "cuda":
        found = [module for module in root.modules() if isinstance(module, nn.RNNBase) and module.dropout]
    rates = [module.dropout for module in found]
    for module in found:
        module.dropout = 0.0
    try:
        yield
    finally:
        for module, rate in zip(found, rates, strict=True):
            module.dropout = rate


def separate_draws(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let torch's generators on ranks of a pipeline that would draw the same as an earlier rank go on from elsewhere.

    Ranks that differ, as in a run that is resumed, are left alone; so is the first one. Collective over ``group``.
    """
    local = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    gathered = gather_json(local, group, device)
    # The first rank with a state keeps it, so a pipeline of one rank, and rank 0 of any, draw what one process draws.
    if gathered[group.rank()] in gathered[: group.rank()]:
        seed = int(torch.randint(2**62, ()))  # the same as on that rank, which does not draw it
        torch.manual_seed(seed + group.rank())


def join_draws(group: dist.ProcessGroup, device: torch.device) -> None:
    """At the end of a run: torch's generators on all ranks of a pipeline go on from the first rank's states.

    Collective over ``group``.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    shared = [state.to(device) for state in states]
    for state in shared:
        dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(shared[0].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(shared[1].cpu(), device)
