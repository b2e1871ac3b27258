"""Parameters that several stages use (tied embeddings): their gradients are summed over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.communication.groups import create_group, new_name
from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.partition.mesh import Ownership

TiedGroups = Mapping[tuple[int, ...], dist.ProcessGroup]


def create_tied_groups(
    ownership: Ownership, pipelines: Sequence[Sequence[int]], timeout: timedelta, device: torch.device
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for each set of ranks that share parameters, in this rank's pipeline. Collective over the world.

    Args:
        ownership: the same in every pipeline.
        pipelines: for each replica the global ranks of its pipeline.
        timeout: of the groups' collectives.
        device: where the gradients are.

    Returns:
        For each such set that this rank is in (pipeline ranks, ascending) its group.
    """
    shared = list(ownership.shared())
    if not shared:
        return {}
    assert dist.group.WORLD is not None
    name, rank = new_name(dist.group.WORLD, device), dist.get_rank()
    replica = next(number for number, pipeline in enumerate(pipelines) if rank in pipeline)
    local: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in shared:
        members = [pipelines[replica][pipeline_rank] for pipeline_rank in ranks]
        if rank in members:
            local[ranks] = create_group(members, f"{name}-tied-{replica}-{ranks}", timeout, device)
    return local


class TiedGradients:
    """Sums gradients over the ranks of a pipeline that hold the same parameter.

    Their values are the same at first (see ``full_state.broadcast_initial``) and stay so: the sum is bit by bit the
    same on all holders.

    Args:
        module: the model.
        ownership: who holds what.
        rank: this one, in the pipeline.
        groups: see :func:`create_tied_groups`.
    """

    def __init__(self, module: nn.Module, ownership: Ownership, rank: int, groups: TiedGroups) -> None:
        named = dict(module.named_parameters())
        self._sets = [
            (groups[ranks], [named[name] for name in names])
            for ranks, names in ownership.shared().items()
            if rank in ranks
        ]

    @torch.no_grad()
    def sum(self) -> None:
        """Replace each shared parameter's ``.grad`` by the sum over its holders. Collective over the pipeline.

        A holder without a gradient counts as zero; if none has one, it stays None.
        """
        for group, parameters in self._sets:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
                _sum(group, [parameter for parameter in trained if parameter.dtype == dtype])


def _sum(group: dist.ProcessGroup, parameters: list[nn.Parameter]) -> None:
    """Replace the gradients of ``parameters`` (of one dtype) by their sums over ``group``.

    One all-reduce of one flat tensor::

        gradient of p0 | gradient of p1 | ... | how many holders have one: p0, p1, ...
    """
    has_one = [parameter.grad is not None for parameter in parameters]
    holders = from_numbers(has_one, parameters[0].dtype, parameters[0].device)
    gradients = [_gradient(parameter).flatten() for parameter in parameters]
    flat = torch.cat([*gradients, holders])
    dist.all_reduce(flat, group=group)
    sizes = [parameter.numel() for parameter in parameters]
    *sums, holders = flat.split([*sizes, len(parameters)])
    counts = [1.0] * len(parameters)
    if not all(has_one):  # only then: reading the counts waits for the device
        counts = holders.tolist()
    for parameter, total, count in zip(parameters, sums, counts, strict=True):
        if count == 0:
            continue
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(total.view(parameter.shape))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The dense gradient of ``parameter``; zeros where it has none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        return parameter.grad.to_dense()
    return parameter.grad
