"""The norm of gradients of which each rank has a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from lightning_smddp._compat.torch import all_gather_single


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
    # The norm of all is that of the ranks' norms: in fp64, as the squares of large ones overflow fp32.
    norm = get_total_norm(gradients, norm_type).to(device=device, dtype=torch.float64, non_blocking=True)
    norms = norm.new_empty(group.size())
    all_gather_single(norms, norm.view(1), group)
    total: Tensor = torch.linalg.vector_norm(norms, norm_type).float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of all ranks' gradients is {float(total)}, so they cannot be "
            "clipped. Set error_if_nonfinite=False to scale by it anyway."
        )
    return total
