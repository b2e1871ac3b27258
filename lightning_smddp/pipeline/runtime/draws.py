"""Random draws of stages (dropout, noise): independent of each other, and the same where two runs are compared.

All ranks begin with the same seed. What no seed resets is the dropout of cuDNN's recurrent layers on CUDA, which draws
from a state of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.wire.gather import gather_json


@contextmanager
def without_own_dropout(root: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it such modules of ``root`` drop nothing, so that two runs with the same seed are alike."""
    rates: list[tuple[nn.RNNBase, float]] = []
    if device.type == "cuda":
        for module in root.modules():
            if isinstance(module, nn.RNNBase) and module.dropout:
                rates.append((module, module.dropout))
    for module, _ in rates:
        module.dropout = 0.0
    try:
        yield
    finally:
        for module, rate in rates:
            module.dropout = rate


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of torch's default generators: the CPU's, and that of ``device`` if it is a CUDA device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_generator_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Let them go on from :func:`generator_states`."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def first_ranks_states(states: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """The first rank's ``states`` on all ranks; the given ones stay what they are. Collective.

    Args:
        states: of :func:`generator_states`.
        group: the ranks of a pipeline.
        device: where the group's messages are.
    """
    sent = [state.to(device, copy=True) for state in states]
    for state in sent:
        dist.broadcast(state, group=group, group_src=0)
    return [state.cpu() for state in sent]


def separate_draws(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let torch's generators on ranks of a pipeline that would draw the same as an earlier rank go on from elsewhere.

    Ranks that differ, as in a run that is resumed, are left alone; so is the first one. Collective over ``group``.
    """
    state = torch.get_rng_state()
    local = zlib.crc32(state.numpy().tobytes())
    gathered = gather_json(local, group, device)
    # The first rank with a state keeps it, so a pipeline of one rank, and rank 0 of any, draw what one process draws.
    rank = group.rank()
    earlier = gathered[:rank]
    if local in earlier:
        seed = int(torch.randint(2**62, ()))  # the same as on that rank, which does not draw it
        torch.manual_seed(seed + rank)


def join_draws(group: dist.ProcessGroup, device: torch.device) -> None:
    """At the end of a run: torch's generators on all ranks of a pipeline go on from the first rank's states.

    Collective over ``group``.
    """
    states = first_ranks_states(generator_states(device), group, device)
    set_generator_states(states, device)
