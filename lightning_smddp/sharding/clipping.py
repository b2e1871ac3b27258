"""Clipping of gradients that are divided among ranks: each looks at its own part, and one number is summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def clip_by_norm(
    parameters: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of gradients of which each rank has its part. Collective.

    Args:
        parameters: with gradients that are divided over ``group``, and some that all ranks have.
        max_norm: above it all gradients are scaled down to it, in place.
        group: the ranks that have one copy of the gradients among them.
        device: for messages.

    Returns:
        The norm of all gradients before clipping.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    divided = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    equal = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    squares = get_total_norm(divided).to(device=device, dtype=torch.float64) ** 2
    dist.all_reduce(squares, group=group)
    squares += get_total_norm(equal).to(squares) ** 2
    norm = squares.sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's
    for gradient in [*divided, *equal]:
        gradient.mul_(factor.to(gradient.device))
    return norm
