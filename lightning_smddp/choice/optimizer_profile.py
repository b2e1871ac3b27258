"""What an optimizer keeps, and needs for a step: tried on one parameter of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp.choice.step_profile import MemoryRecord
from lightning_smddp.pytree import tensors
from lightning_smddp.sharding.optimizer_trial import copy_with

_FALLBACK_COPIES = 2  # of a parameter, as Adam has


@dataclass(frozen=True)
class OptimizerProfile:
    """Of all optimizers of a module.

    Attributes:
        state: bytes that they keep, by parameter's id.
        temporary: bytes that a step needs for a moment.
        notes: what could not be tried.
    """

    state: dict[int, int]
    temporary: int
    notes: tuple[str, ...] = ()


def profile_optimizers(optimizers: Sequence[Optimizer]) -> OptimizerProfile:
    """Step a copy of each optimizer on one parameter of each shape, with gradients of zero. Nothing of them changes."""
    state: dict[int, int] = {}
    temporary = 0
    notes = []
    for optimizer in optimizers:
        try:
            temporary = max(temporary, _profile(optimizer, state))
        except Exception as error:  # whatever a user's optimizer raises
            for _, parameter in _trained(optimizer):
                state[id(parameter)] = _FALLBACK_COPIES * parameter.nbytes
            notes.append(
                f"{type(optimizer).__name__} cannot be tried on one parameter ({type(error).__name__}: {error}): "
                "counted with two numbers for each of a parameter"
            )
    return OptimizerProfile(state, temporary, tuple(notes))


def _profile(optimizer: Optimizer, state: dict[int, int]) -> int:
    """Fill ``state``; returns the bytes that a step needs for a moment."""
    tried: dict[tuple[int, torch.Size, torch.dtype], tuple[int, int]] = {}  # by group, shape and type
    # A step with `foreach` has the results of all parameters at once, another one those of one parameter.
    together = 0
    alone = 0
    for number, parameter in _trained(optimizer):
        kind = (number, parameter.shape, parameter.dtype)
        if kind not in tried:
            tried[kind] = _try(optimizer, number, parameter)
        state[id(parameter)], temporary = tried[kind]
        if optimizer.param_groups[number].get("foreach"):
            together += temporary
        else:
            alone = max(alone, temporary)
    return max(alone, together)


def _trained(optimizer: Optimizer) -> list[tuple[int, Tensor]]:
    """Parameters with gradients, each with the number of its group."""
    groups = enumerate(optimizer.param_groups)
    return [(number, parameter) for number, group in groups for parameter in group["params"] if parameter.requires_grad]


def _try(optimizer: Optimizer, number: int, like: Tensor) -> tuple[int, int]:
    """Bytes that a copy of ``optimizer`` keeps, and needs in a step, for a parameter like one in its group."""
    parameter = nn.Parameter(torch.zeros_like(like))
    parameter.grad = torch.zeros_like(parameter)
    nothing = nn.Parameter(torch.empty(0))
    stand_ins = {id(other): nothing for group in optimizer.param_groups for other in group["params"]}
    trial = copy_with(optimizer, {**stand_ins, id(like): parameter})
    for index, group in enumerate(trial.param_groups):
        group["params"] = [parameter] if index == number else []
    step = type(trial).step  # an instance's own may be a scheduler's
    # The first step makes the state: what later ones need for a moment is seen in the second.
    step(trial)
    record = MemoryRecord()
    record.run(lambda: step(trial))
    # By address: what several entries share counts once.
    sizes = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(trial.state[parameter])}
    return sum(sizes.values()), record.peak
