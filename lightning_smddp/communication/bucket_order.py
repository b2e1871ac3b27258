"""DDP's buckets as they were in the run that is resumed: sums of more than two numbers depend on their order.

DDP cuts its buckets twice: before the first step by the order of parameters, after it by the order in which gradients
came. Where in a bucket an element lies decides the order in which a ring sums it over the ranks. So a resumed run's
first step would differ from the unbroken run's in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_smddp.communication.hook import GradientSynchronizer


def settle_buckets(model: DistributedDataParallel, synchronizer: GradientSynchronizer, order: Sequence[str]) -> None:
    """Have DDP cut its buckets by ``order``, once and for all, by a backward pass whose gradients come in it.

    Nothing is averaged, and no gradient stays. It is left out where DDP would not cut them anew, or where the module
    does not train just these parameters.

    Args:
        model: before its first step.
        synchronizer: whose hook it has.
        order: names of parameters, as :meth:`GradientSynchronizer.bucket_order` gave them.
    """
    trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    sparse = any(getattr(module, "sparse", False) for module in model.module.modules())
    if set(order) != set(trained) or model.find_unused_parameters or model.static_graph or sparse:
        return

    def forward(_: object) -> Tensor:
        """Autograd goes backward by age, youngest first."""
        loss = torch.zeros((), device=next(iter(trained.values())).device)
        for name in reversed(order):
            loss = loss + trained[name].float().sum() * 0.0
        return loss

    with synchronizer.rehearsing(), torch.enable_grad():
        _call(model, forward).backward()
    for parameter in trained.values():
        parameter.grad = None


def _call(model: DistributedDataParallel, forward: object) -> Tensor:
    """What ``forward`` returns in place of the module's own, through DDP."""
    module: nn.Module = model.module
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        result: Tensor = model(None)  # on CUDA DDP fails without any argument
    finally:
        vars(module).pop("forward")
        if own is not None:
            vars(module)["forward"] = own
    return result
