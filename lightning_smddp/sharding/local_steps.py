"""Steps of optimizers on this rank's shares of parameters as plain tensors, where torch would step ``DTensor`` objects.

torch sends each operation on a ``DTensor`` through its rules for placements, dozens of times for each parameter and
step. An optimizer that treats each element by itself needs none of that: the same numbers come from the shares alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_smddp._compat.fsdp import divided_like
from lightning_smddp.sharding.optimizer_shards import closure_called, next_to_step


class LocalSteps:
    """Lets ``optimizer`` step shares, until :meth:`close`. Outside of steps its groups and states are as ever.

    Args:
        optimizer: one that treats each element by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        self._whole: list[list[Tensor]] | None = None  # the groups' parameters, while it steps
        self._known: dict[Tensor, tuple[dict[str, Any], dict[str, Any]]] = {}  # states: as ever, and of shares

    def stand_next_to_step(self) -> None:
        """Be the last one before the step and the first one behind it, among hooks that others have registered."""
        next_to_step(*self._handles)

    def restore(self) -> None:
        """Behind a step, also one that failed: groups and states are as ever."""
        if self._whole is None:
            return
        # The optimizer's state has shares as its keys, where it had parameters before the step.
        states = self.optimizer.state
        for group, parameters in zip(self.optimizer.param_groups, self._whole, strict=True):
            for parameter, share in zip(parameters, group["params"], strict=True):
                if share is not parameter and share in states:
                    of_share = states.pop(share)
                    states[parameter] = self._with_placements(parameter, of_share)
            group["params"] = parameters
        self._whole = None
        self._known.clear()

    def close(self) -> None:
        """Take the hooks off the optimizer, whose steps are torch's own again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The closure comes first: it computes gradients of the parameters."""
        args, kwargs = closure_called(args, kwargs)
        self._whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._share_of(parameter) for parameter in group["params"]]
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()

    def _share_of(self, parameter: Tensor) -> Tensor:
        """This rank's part, with its gradient and state; the parameter itself where it is not divided."""
        if not isinstance(parameter, DTensor):
            return parameter
        share = parameter.to_local().detach()
        share.requires_grad_(parameter.requires_grad)
        if parameter.grad is not None:
            share.grad = _local(parameter.grad)
        if parameter in self.optimizer.state:
            # The step has to find state by the share, as it would by the parameter. Tensors in it are the same memory,
            # so what it writes in place is written to the state of the parameter as well; `restore` looks only for new
            # objects.
            state = self.optimizer.state.pop(parameter)
            of_share = {name: _local(value) for name, value in state.items()}
            self._known[parameter] = (state, dict(of_share))  # a copy: the step puts its new objects into the other
            self.optimizer.state[share] = of_share
        return share

    def _with_placements(self, parameter: Tensor, of_share: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter from that of its share. What the step wrote in place is there already."""
        assert isinstance(parameter, DTensor)
        state, before = self._known.get(parameter, ({}, {}))
        found = {}
        for name, value in of_share.items():
            if name in before and before[name] is value:
                found[name] = state[name]
            elif isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.to_local().shape:
                found[name] = divided_like(value, parameter)
            else:
                found[name] = value
        return found


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.to_local()
    return value
