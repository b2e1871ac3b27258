"""Clipping of gradients that are divided among ranks: each looks at its own part, and one number is summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_smddp.communication.norms import norm_over_ranks


def clip_by_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    group: dist.ProcessGroup,
    device: torch.device,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of gradients of which each rank has its part. Collective.

    Args:
        parameters: with gradients that are divided over ``group``, and some that all ranks have.
        max_norm: above it all gradients are scaled down to it, in place.
        group: the ranks that have one copy of the gradients among them.
        device: for messages.
        norm_type: p of the norm, positive or ``inf``.
        error_if_nonfinite: raise ``RuntimeError`` on every rank if the norm is inf or nan.

    Returns:
        The norm of all gradients before clipping.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    divided = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    equal = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    own = divided
    if dist.get_rank(group) == 0:  # what all ranks have counts once
        own = divided + equal
    norm = norm_over_ranks(own, group, norm_type, device, error_if_nonfinite)
    # Most steps need no scaling. That is known where the norm is; of a device it would have to be waited for.
    if device.type != "cpu" or not float(norm) + 1e-6 <= max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's
        for gradient in [*divided, *equal]:
            gradient.mul_(factor.to(gradient.device))
    return norm
