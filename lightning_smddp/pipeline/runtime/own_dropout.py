"""Modules whose dropout draws from a state of its own, which no seed resets: cuDNN's, of recurrent layers on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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
