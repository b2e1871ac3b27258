"""How an optimizer can be sharded, found by trying it on small parameters.

ZeRO's first stage (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054) has each rank step a part of the
parameters. A part of a *parameter* is right only for optimizers that treat each element by itself (SGD, Adam, RMSprop);
those that look at a whole parameter (Adafactor, LAMB, Muon) need whole ones; and those that look at all of them at once
(LBFGS, a norm over all gradients) cannot be sharded.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_STEPS = 12  # some optimizers begin to do more than they did only after some steps, as RAdam after five
_LEARNING_RATE = 1e-2  # a schedule may begin with zero
_SIDES = {0: (), 1: (6007,), 2: (96, 129), 3: (9, 32, 43), 4: (6, 8, 16, 17), 5: (3, 4, 8, 8, 17)}
# More than 4096 elements each, odd ones: optimizers with 8-bit states take small tensors in another way.


class Granularity(Enum):
    """What an optimizer treats by itself."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    NONE = "none"


def granularity(optimizer: Optimizer) -> tuple[Granularity, str]:
    """What ``optimizer`` treats by itself, and why it is not finer. Changes nothing of it.

    Parameters of the trial have the numbers of dimensions, types and devices of the optimizer's own.
    """
    kinds = _kinds(optimizer)
    try:
        whole = _after_steps(optimizer, [_trial(kind) for kind in kinds], range(len(kinds)))
        alone = [_after_steps(optimizer, [_trial(kind)], [number])[0] for number, kind in enumerate(kinds)]
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        return Granularity.NONE, f"a trial of its step failed with {type(error).__name__}: {error}"
    for kind, together, single in zip(kinds, whole, alone, strict=True):
        if not _equal(together, single):
            return Granularity.NONE, f"what it does to one parameter depends on others ({_describe(kind)})"
    for number, (kind, expected) in enumerate(zip(kinds, whole, strict=True)):
        why = _differs_in_parts(optimizer, kind, number, expected)
        if why is not None:
            return Granularity.PARAMETER, why
    return Granularity.ELEMENT, ""


Kind = tuple[int, int, torch.dtype, torch.device]
"""A group's number, dimensions, type and device."""


def _kinds(optimizer: Optimizer) -> list[Kind]:
    """One of each kind of parameters, at least two: what depends on other parameters shows with two only."""
    kinds: dict[Kind, None] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kinds[number, min(parameter.ndim, max(_SIDES)), parameter.dtype, parameter.device] = None
    found = list(kinds)
    return found if len(found) > 1 else found * 2


def _describe(kind: Kind) -> str:
    return f"seen with {kind[1]} dimensions, {kind[2]}"


def _trial(kind: Kind) -> tuple[int, Tensor]:
    group, ndim, dtype, device = kind
    values = torch.randn(_SIDES[ndim], generator=torch.Generator().manual_seed(ndim))
    return group, values.to(device, dtype)


def _gradients(number: int, step: int, like: Tensor) -> Tensor:
    """The same for each trial, of very different sizes from step to step."""
    generator = torch.Generator().manual_seed(1000 * number + step)
    values = torch.randn(like.shape, generator=generator) * 10.0 ** (step % 5 - 2)
    return values.to(like.device, like.dtype)


def _after_steps(optimizer: Optimizer, trials: Sequence[tuple[int, Tensor]], numbers: Sequence[int]) -> list[Tensor]:
    """The trial parameters after some steps with the gradients of these numbers."""
    parameters = [nn.Parameter(values) for _, values in trials]
    trial = _like(optimizer, [(group, p) for (group, _), p in zip(trials, parameters, strict=True)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for step in range(_STEPS):
            for number, parameter in zip(numbers, parameters, strict=True):
                parameter.grad = _gradients(number, step, parameter)
            trial.step()
    return [parameter.detach() for parameter in parameters]


def _differs_in_parts(optimizer: Optimizer, kind: Kind, number: int, expected: Tensor) -> str | None:
    """Why a parameter in two parts, of which one rank has one, is not stepped as the whole; None if it is."""
    group, values = _trial(kind)
    cut = values.numel() * 2 // 5
    for low, high in ((0, cut), (cut, values.numel())):
        if low == high:
            continue
        part = nn.Parameter(values.reshape(-1)[low:high].clone())
        try:
            trial = _like(optimizer, [(group, part)])
            for step in range(_STEPS):
                part.grad = _gradients(number, step, values).reshape(-1)[low:high].clone()
                trial.step()
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            return f"a step on a part of a parameter failed with {type(error).__name__}: {error}"
        if not _equal(part.detach(), expected.reshape(-1)[low:high]):
            return f"a part of a parameter is stepped in another way than the whole ({_describe(kind)})"
    return None


def _like(optimizer: Optimizer, members: Sequence[tuple[int, nn.Parameter]]) -> Optimizer:
    """The same optimizer on other parameters, without state, hooks, or a schedule's wrapper around its step."""
    trial = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name != "step" and name not in vars(trial):
            setattr(trial, name, copy.deepcopy(value))
    trial.state = defaultdict(dict)
    trial.param_groups = []
    for number in sorted({group for group, _ in members}):
        words: dict[str, Any] = {
            key: copy.deepcopy(value) for key, value in optimizer.param_groups[number].items() if key != "params"
        }
        if isinstance(words.get("lr"), Tensor):
            words["lr"] = torch.full_like(words["lr"], _LEARNING_RATE)
        elif "lr" in words:
            words["lr"] = _LEARNING_RATE
        words["params"] = [parameter for group, parameter in members if group == number]
        trial.param_groups.append(words)
    return trial


def _equal(one: Tensor, other: Tensor) -> bool:
    """Up to the last bits, which differ where a vector's end is computed element by element."""
    tolerance = 1e-6 if one.dtype in (torch.float32, torch.float64) else 1e-2
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
