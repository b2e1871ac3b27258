"""The norm of gradients of which each rank has a part."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm


def norm_over_ranks(
    gradients: Sequence[Tensor],
    group: dist.ProcessGroup,
    norm_type: float,
    device: torch.device,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """The norm of the gradients of all ranks together, as ``torch.nn.utils.get_total_norm`` of one. Collective.

    Args:
        gradients: of this rank; no other one has the same.
        group: the ranks.
        norm_type: p of the norm, positive or ``inf``.
        device: of the gradients.
        error_if_nonfinite: raise ``RuntimeError`` on every rank if the norm is inf or nan.

    Returns:
        A scalar in fp32, the same on every rank.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} has to be positive, or inf.")
    # norm of all = (sum over ranks of norm(rank)^p)^(1/p)
    norm = get_total_norm(gradients, norm_type).to(device=device, dtype=torch.float64, non_blocking=True)
    if norm_type == inf:
        # MAX of nan is not the same on every backend: an inf in its place, and the number of nans beside it
        without_nan = norm.nan_to_num(inf, posinf=inf)
        pair = torch.stack([without_nan, norm.isnan().to(norm)])
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
        largest, nans = pair
        norm = largest.where(nans == 0, float("nan"))
    else:
        norm = norm**norm_type  # in fp64: the squares of large norms overflow fp32
        dist.all_reduce(norm, group=group)
        norm = norm ** (1.0 / norm_type)
    total = norm.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of all ranks' gradients is {float(total)}, so they cannot be "
            "clipped. Set error_if_nonfinite=False to scale by it anyway."
        )
    return total
