"""What an optimizer keeps, and needs for a step: tried on one parameter of each kind."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_smddp._compat.torch_memory import recorded_memory
from lightning_smddp.choice.step_profile import profile_of, shortest
from lightning_smddp.pytree import tensors
from lightning_smddp.sharding.optimizer_trial import copy_with

_FALLBACK_COPIES = 2  # of a parameter, as Adam has


@dataclass(frozen=True)
class _Trial:
    """Of a step of one parameter.

    Attributes:
        state: bytes that are kept.
        temporary: bytes that the step needs for a moment.
        seconds: of a later step, as the first one makes the state.
    """

    state: int
    temporary: int
    seconds: float


@dataclass(frozen=True)
class OptimizerProfile:
    """Of all optimizers of a module.

    Attributes:
        state: bytes that they keep, by parameter's id.
        temporary: bytes that a step needs for a moment.
        seconds: of a step of all parameters, beside the next.
        fixed_seconds: of a step however few parameters there are; no sharding makes it shorter.
        notes: what could not be tried.
    """

    state: dict[int, int]
    temporary: int
    seconds: float
    fixed_seconds: float = 0.0
    notes: tuple[str, ...] = ()


def profile_optimizers(optimizers: Sequence[Optimizer]) -> OptimizerProfile:
    """Step a copy of each optimizer on one parameter of each shape, with gradients of zero. Nothing of them changes."""
    state: dict[int, int] = {}
    temporary = 0
    seconds = 0.0
    fixed_seconds = 0.0
    notes = []
    for optimizer in optimizers:
        tried: dict[tuple[int, torch.Size, torch.dtype], _Trial] = {}  # by group, shape and type
        # A step with `foreach` has the results of all parameters at once, another one those of one parameter.
        together = 0
        alone = 0
        try:
            fixed = _fixed_seconds(optimizer)
            fixed_seconds += fixed
            for number, group in enumerate(optimizer.param_groups):
                for parameter in filter(_is_trained, group["params"]):
                    kind = (number, parameter.shape, parameter.dtype)
                    if kind not in tried:
                        tried[kind] = _try(optimizer, number, parameter, parameter.shape)
                    trial = tried[kind]
                    state[id(parameter)] = trial.state
                    seconds += max(0.0, trial.seconds - fixed)
                    if group.get("foreach"):
                        together += trial.temporary
                    else:
                        alone = max(alone, trial.temporary)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            for group in optimizer.param_groups:
                for parameter in filter(_is_trained, group["params"]):
                    state[id(parameter)] = _FALLBACK_COPIES * parameter.nbytes
            name = type(error).__name__
            notes.append(
                f"{type(optimizer).__name__} cannot be tried on one parameter ({name}: {error}): counted with two "
                "numbers for each of a parameter"
            )
        temporary = max(temporary, alone, together)
    return OptimizerProfile(state, temporary, seconds, fixed_seconds, tuple(notes))


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad


def _fixed_seconds(optimizer: Optimizer) -> float:
    """Of a step of one parameter with a single number."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in filter(_is_trained, group["params"]):
            shape = torch.Size([1] * parameter.ndim)
            return _try(optimizer, number, parameter, shape).seconds
    return 0.0


def _try(optimizer: Optimizer, number: int, like: Tensor, shape: torch.Size) -> _Trial:
    """Step a copy of ``optimizer`` on one parameter like one in its group ``number``, but of this shape."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=like.dtype))
    parameter.grad = torch.zeros_like(parameter)
    nothing = nn.Parameter(torch.empty(0))
    stand_ins: dict[int, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for other in group["params"]:
            stand_ins[id(other)] = nothing
    stand_ins[id(like)] = parameter
    trial = copy_with(optimizer, stand_ins)
    for group in trial.param_groups:
        group["params"] = []
    trial.param_groups[number]["params"] = [parameter]
    step = functools.partial(type(trial).step, trial)  # an instance's own may be a scheduler's
    # The first step makes the state: what later ones need for a moment is seen in the second.
    step()
    with recorded_memory() as record:
        step()
    seconds = shortest(step)
    sizes: dict[int, int] = {}  # by address: what several entries share counts once
    for tensor in tensors(trial.state[parameter]):
        sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
    return _Trial(sum(sizes.values()), profile_of(record).peak, seconds)
