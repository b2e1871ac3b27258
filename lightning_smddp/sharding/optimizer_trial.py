"""What an optimizer treats by itself: known of torch's, said by the class of others, and tried on small copies.

ZeRO's first stage (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054) has each rank step a part of the
parameters. A part of a *parameter* is right only for optimizers that treat each element by itself (SGD, Adam, RMSprop);
those that look at a whole parameter (Adafactor, LAMB, Muon) need whole ones; and those that look at all of them at once
(LBFGS, a norm over all gradients) cannot be divided, neither over replicas nor over the stages of a pipeline.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from lightning_smddp.communication.tensors import CPU
from lightning_smddp.sharding.optimizer_shards import all_parameters

# Exactly these classes: what a class derived from one of them does in a step is not known.
_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, ASGD, RMSprop, Rprop)
_STEPS = 12  # some optimizers begin to do more than they did only after some steps, as RAdam after five
_LEARNING_RATE = 1e-2  # at least: a schedule may begin with zero
_LARGEST = 3  # elements of small copies in each dimension
_TOLERANCE = 1e-6


def why_not_elementwise(optimizer: Optimizer) -> str | None:
    """Why ``optimizer`` is not known to treat each element of a parameter by itself; None if it is.

    Of classes that are not torch's, those with an attribute ``elementwise = True`` do.
    """
    cls = type(optimizer)
    if cls in _ELEMENTWISE or getattr(cls, "elementwise", False):
        return None
    return (
        "it is not known to treat each element of a parameter by itself (where it does: "
        f"`{cls.__name__}.elementwise = True`)"
    )


def why_not_one_by_one(optimizer: Optimizer) -> str | None:
    """Why a step on some of the parameters does to them something else than a step on all of them; None if it does not.

    torch's optimizers, but LBFGS, are known not to. Others are copied, with small parameters, and the copies are
    stepped once with all of them, once with each half: what is done to each by itself is the same. One that uses
    the norm of all gradients, asks for a closure, or draws random numbers shows by that.
    """
    if isinstance(optimizer, LBFGS):
        return "its step needs all parameters and gradients at once"
    if type(optimizer).__module__.startswith("torch.optim."):
        return None
    count = len(all_parameters(optimizer))
    if count == 1:
        return "what it does to one parameter cannot be told from what it does to all, as it has no second one"
    half = count // 2
    try:
        together = _stepped(optimizer, range(count))
        apart = [*_stepped(optimizer, range(half)).items(), *_stepped(optimizer, range(half, count)).items()]
    except Exception as error:  # whatever the reason is
        return f"a trial of its step failed with {type(error).__name__}: {error}"
    for place, value in apart:
        if not torch.allclose(together[place], value, rtol=_TOLERANCE, atol=0.0, equal_nan=True):
            return "what it does to one parameter depends on others"
    return None


def _stepped(optimizer: Optimizer, numbers: range) -> dict[Any, Tensor]:
    """What some steps make of a small copy, of whose parameters those of some ``numbers`` are stepped alone.

    These parameters, by number, and the numbers that their groups have: what an optimizer finds out of all gradients,
    such as D-Adaptation, may change a parameter only many steps later.
    """
    originals = all_parameters(optimizer)
    small = [_small(parameter, number) for number, parameter in enumerate(originals)]
    stand_ins = {id(original): copied for original, copied in zip(originals, small, strict=True)}
    clone = copy_with(optimizer, stand_ins)
    chosen = {id(small[number]) for number in numbers}
    for group in clone.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
    first_values = [parameter.detach().clone() for parameter in small]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed the GPUs for good
        for step in range(_STEPS):
            for number in numbers:
                small[number].grad = _gradient(first_values[number], number, step)
            type(clone).step(clone)
    found: dict[Any, Tensor] = {number: small[number].detach() for number in numbers}
    for index, group in enumerate(clone.param_groups):
        for key, value in group.items():
            is_number = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
            if is_number and group["params"]:
                found[index, key] = torch.as_tensor(value, dtype=torch.float64)
    return found


def _small(parameter: Tensor, number: int) -> nn.Parameter:
    """A parameter of as many dimensions."""
    shape = [min(size, _LARGEST) for size in parameter.shape]
    values = torch.linspace(-1, 1, math.prod(shape)).reshape(shape) + 0.1 * number
    device = CPU if parameter.is_meta else parameter.device
    return nn.Parameter(values.to(device, parameter.dtype), parameter.requires_grad)


def _gradient(values: Tensor, number: int, step: int) -> Tensor:
    """From small to so large that each limit of a norm is passed, and of another size for each parameter.

    First they change their direction, as conjugate gradients look at it; then they keep it, as some optimizers take
    larger steps by how far they have gone.
    """
    shift = step if step < _STEPS // 2 else 0
    power = 2 * (step % 6) - 4  # from -4 to 6
    return (values * 3 + shift).cos() * (1.0 + number) * 10.0**power


def copy_with(optimizer: Optimizer, parameters: dict[int, nn.Parameter]) -> Any:
    """A copy of ``optimizer`` in its first state, without hooks, with other parameters, and a learning rate not zero.

    Args:
        optimizer: the user's.
        parameters: what stands in for each, also where attributes hold them, by the ``id`` of the optimizer's own.
    """
    # `deepcopy` takes what its memo has for an object's `id` instead of copying it. So the copy has the stand-ins, an
    # empty state and itself wherever the optimizer's attributes lead to parameters, the state or the optimizer.
    clone: Any = object.__new__(type(optimizer))
    memo = {**parameters, id(optimizer.state): defaultdict(dict), id(optimizer): clone}
    attributes = {}
    for name, value in vars(optimizer).items():
        if name != "step" and not name.startswith("_optimizer_"):  # a scheduler's, bound to the original; hooks
            attributes[name] = copy.deepcopy(value, memo)
    Optimizer.__setstate__(clone, attributes)
    for group in clone.param_groups:
        if group.get("lr") is not None:
            group["lr"] = max(group["lr"], _LEARNING_RATE)
    return clone
