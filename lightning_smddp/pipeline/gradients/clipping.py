"""What has to be known of all stages' gradients before a step: their norm, and whether one of them overflowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_smddp.communication.norms import norm_over_ranks
from lightning_smddp.pipeline.partition.mesh import Ownership
from lightning_smddp.wire.stream import CPU


def clip_by_norm(
    parameters: Mapping[str, nn.Parameter],
    ownership: Ownership,
    group: dist.ProcessGroup,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    device: torch.device = CPU,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over all stages of a pipeline. Collective.

    A parameter that several ranks hold counts once; its gradient has to be summed before (``tied.TiedGradients``).

    Args:
        parameters: of this rank, by first name.
        ownership: who holds what.
        group: the ranks of this pipeline.
        max_norm: above it all gradients are scaled down to it, in place.
        norm_type: p of the norm, positive or ``inf``.
        error_if_nonfinite: raise ``RuntimeError`` on every rank if the norm is inf or nan.
        device: of the gradients.

    Returns:
        The norm of all gradients before clipping, the same on every rank: a scalar.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    # A tied parameter has the same summed gradient on several ranks, so its owner alone counts it; all of its holders
    # scale it by the same factor.
    rank = group.rank()
    counted = [
        parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None and ownership.owner(name) == rank
    ]
    total = norm_over_ranks(counted, group, norm_type, device, error_if_nonfinite)
    clip_grads_with_norm_(parameters.values(), max_norm, total)
    return total


def clip_by_value(optimizer: Optimizer, clip_val: float) -> None:
    """``torch.nn.utils.clip_grad_value_`` of this stage's gradients; torch's raises where there are none."""
    gradients = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if gradients:
        clip_grad_value_(gradients, clip_val)


def take_over_clipping(plugin: Any, by_norm: Callable[[Any, float], None]) -> None:
    """Let Lightning's precision ``plugin`` clip by norm with ``by_norm``, and by value with :func:`clip_by_value`."""
    plugin.clip_grad_by_norm, plugin.clip_grad_by_value = by_norm, clip_by_value


def give_back_clipping(plugin: Any) -> None:
    """Let the precision plugin clip by its own methods again, at the end of a run."""
    vars(plugin).pop("clip_grad_by_norm", None)
    vars(plugin).pop("clip_grad_by_value", None)


def share_overflow(parameters: Iterable[nn.Parameter], placeholder: nn.Parameter, group: dist.ProcessGroup) -> None:
    """If a gradient of any stage is not finite, every rank's ``GradScaler`` will skip the step. Collective.

    A ``GradScaler`` looks at the gradients of its own rank only, so without this one stage would skip a step that the
    others make, and their scales would part. To be called for each optimizer before ``GradScaler.unscale_``.

    Args:
        parameters: of this rank in the optimizer.
        placeholder: see ``OptimizerPartition.add_placeholder``; its gradient becomes 0 or inf.
        group: the ranks of this pipeline.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and p is not placeholder]
    dense = []
    for gradient in gradients:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        dense.append(gradient)
    norm = get_total_norm(dense, inf)
    flag = (~norm.isfinite()).to(placeholder).view(1, 1)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    placeholder.grad = torch.where(flag > 0, inf, 0.0).to(flag)
