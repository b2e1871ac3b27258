"""Random draws of stages (dropout, noise): independent of each other, and the same where two runs are compared.

All ranks begin with the same seed. What no seed resets is the dropout of cuDNN's recurrent layers on CUDA, which draws
from a state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
