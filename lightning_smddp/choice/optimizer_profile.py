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
from lightning_smddp.sharding.optimizer_trial import copy_with
from lightning_smddp.wire.pytree import tensors

_FALLBACK_COPIES = 2  # of a parameter, as Adam has
_Kind = tuple[int, torch.Size, torch.dtype]  # group, shape, type


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
    temporary, seconds, fixed_seconds = 0, 0.0, 0.0
    notes = []
    for optimizer in optimizers:
        tried: dict[_Kind, tuple[int, int, float]] = {}
        passing = []
        try:
            fixed = _fixed_seconds(optimizer)
            fixed_seconds += fixed
            for number, group in enumerate(optimizer.param_groups):
                for parameter in filter(_is_trained, group["params"]):
                    kind = (number, parameter.shape, parameter.dtype)
                    if kind not in tried:
                        tried[kind] = _try(optimizer, number, parameter)
                    state[id(parameter)] = tried[kind][0]
                    passing.append((bool(group.get("foreach")), tried[kind][1]))
                    seconds += max(0.0, tried[kind][2] - fixed)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            own = [p for group in optimizer.param_groups for p in group["params"] if _is_trained(p)]
            state.update({id(parameter): _FALLBACK_COPIES * parameter.nbytes for parameter in own})
            name = type(error).__name__
            notes.append(
                f"{type(optimizer).__name__} cannot be tried on one parameter ({name}: {error}): counted with two "
                "numbers for each of a parameter"
            )
        alone = max([size for is_together, size in passing if not is_together], default=0)
        temporary = max(temporary, alone, sum(size for is_together, size in passing if is_together))
    return OptimizerProfile(state, temporary, seconds, fixed_seconds, tuple(notes))


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad


def _fixed_seconds(optimizer: Optimizer) -> float:
    """Of a step of one parameter with a single number."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in filter(_is_trained, group["params"]):
            return _try(optimizer, number, parameter, torch.Size([1] * parameter.ndim))[2]
    return 0.0


def _try(optimizer: Optimizer, group: int, like: Tensor, shape: torch.Size | None = None) -> tuple[int, int, float]:
    """Bytes of state, bytes for a moment, and seconds of a later step, with ``shape`` in place of its own."""
    parameter = nn.Parameter(torch.zeros(like.shape if shape is None else shape, dtype=like.dtype))
    parameter.grad = torch.zeros_like(parameter)
    nothing = nn.Parameter(torch.empty(0))
    everyone = [other for members in optimizer.param_groups for other in members["params"]]
    trial = copy_with(optimizer, {**{id(other): nothing for other in everyone}, id(like): parameter})
    for number, members in enumerate(trial.param_groups):
        members["params"] = [parameter] if number == group else []
    step = functools.partial(type(trial).step, trial)  # an instance's own may be a scheduler's
    step()
    with recorded_memory() as record:
        step()
    seconds = shortest(step)
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(trial.state[parameter])}
    return sum(storages.values()), profile_of(record).peak, seconds
