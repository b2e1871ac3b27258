"""Random draws of stages (dropout, noise): independent of each other, and the same where two runs are compared.

All ranks begin with the same seed. What no seed resets is the dropout of cuDNN's recurrent layers on CUDA, which draws
from a state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
