"""Whether an optimizer treats parameters one by one: tried out on a small copy of it."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

_STEPS = 6
_LARGEST = 3  # elements of the copies' parameters in each dimension


def steps_one_by_one(optimizer: Optimizer) -> bool:
    """Whether a step of ``optimizer`` on some of its parameters does to them what a step on all of them does.

    Those of torch do, but for LBFGS. Others are copied, with small parameters, and stepped: once with all, once with
    each half. An optimizer that uses the norm of all gradients (LAMB with a global norm), asks for a closure, or draws
    random numbers does not. Nothing of ``optimizer`` changes.
    """
    if isinstance(optimizer, LBFGS):
        return False
    if type(optimizer).__module__.startswith("torch.optim."):
        return True
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count < 2:
        return True
    half = count // 2
    try:
        together = _stepped(optimizer, range(count))
        apart = _stepped(optimizer, range(half)) + _stepped(optimizer, range(half, count))
    except Exception:  # it cannot be stepped so, whatever the reason is
        return False
    return all(torch.allclose(one, other, rtol=1e-12, atol=0.0) for one, other in zip(together, apart, strict=True))


def _stepped(optimizer: Optimizer, chosen: Sequence[int]) -> list[Tensor]:
    """The values of the ``chosen`` parameters of a small copy after some steps on them alone."""
    originals = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    small = [_small(parameter, number) for number, parameter in enumerate(originals)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clone = _copied(optimizer, dict(zip(map(id, originals), small, strict=True)))
        kept = {id(small[number]) for number in chosen}
        for group in clone.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
        for step in range(_STEPS):
            for number in chosen:
                small[number].grad = _gradient(small[number], number, step)
            type(clone).step(clone)  # an instance's own may be a scheduler's, bound to the original
    return [small[number].detach() for number in chosen]


def _small(parameter: Tensor, number: int) -> nn.Parameter:
    """A parameter of as many dimensions, in double precision: what is done to each element alone is the same bits."""
    shape = [min(size, _LARGEST) for size in parameter.shape]
    values = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).reshape(shape)
    return nn.Parameter(values + 0.1 * number, parameter.requires_grad)


def _gradient(parameter: Tensor, number: int, step: int) -> Tensor:
    """From small to so large that each limit of a norm is passed, and of another size for each parameter."""
    return (parameter.detach() * 3 + step).cos() * (1.0 + number) * 10.0 ** (2 * step - 4)


def _copied(optimizer: Optimizer, parameters: dict[int, nn.Parameter]) -> Any:
    """A copy of ``optimizer`` in its first state, with other parameters and without hooks."""
    memo: dict[int, Any] = dict(parameters)
    memo[id(optimizer.state)] = defaultdict(dict)
    clone = object.__new__(type(optimizer))
    memo[id(optimizer)] = clone
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):
            vars(clone)[name] = OrderedDict()
        elif name != "step":
            vars(clone)[name] = copy.deepcopy(value, memo)
    return clone
