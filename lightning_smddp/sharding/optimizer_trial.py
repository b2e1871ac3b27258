"""What an optimizer treats by itself, found by stepping small copies of it. The optimizer is never touched.

ZeRO's first stage (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054) has each rank step a part of the
parameters. A part of a *parameter* is right only for optimizers that treat each element by itself (SGD, Adam, RMSprop);
those that look at a whole parameter (Adafactor, LAMB, Muon) need whole ones; and those that look at all of them at once
(LBFGS, a norm over all gradients) cannot be divided, neither over replicas nor over the stages of a pipeline.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

_STEPS = 12  # some optimizers begin to do more than they did only after some steps, as RAdam after five
_LEARNING_RATE = 1e-2  # at least: a schedule may begin with zero
_LARGEST = 3  # elements of small copies in each dimension
# Shapes of trials, by number of dimensions. More than 4096 elements but for 0: optimizers with 8-bit states take small
# tensors in another way. The last side is odd, so that rows do not end where vectors do.
_SHAPES = {
    0: (),
    1: (6007,),
    2: (96, 129),
    3: (9, 32, 43),
    4: (6, 8, 16, 17),
    5: (3, 4, 8, 8, 17),
}
_CPU = torch.device("cpu")


class Granularity(Enum):
    """What an optimizer treats by itself."""

    ELEMENT = "element"
    PARAMETER = "parameter"
    NONE = "none"


def why_not_one_by_one(optimizer: Optimizer) -> str | None:
    """Why a step on some of the parameters does to them something else than a step on all of them; None if it does not.

    torch's optimizers, but LBFGS, are known not to. Others are copied, with small parameters in double precision, where
    what is done to each by itself is the same bits; an optimizer without double precision in its own type. The copies
    are stepped once with all parameters, once with each half. One that uses the norm of all gradients, asks for a
    closure, or draws random numbers shows by that.
    """
    if isinstance(optimizer, LBFGS):
        return "its step needs all parameters and gradients at once"
    if type(optimizer).__module__.startswith("torch.optim."):
        return None
    try:
        together, apart = _whole_and_halves(optimizer, in_double=True)
        tolerance = 1e-12
    except Exception:  # whatever the reason is: it may know its own type alone
        try:
            together, apart = _whole_and_halves(optimizer, in_double=False)
        except Exception as error:
            return _failure("its step", error)
        tolerance = 1e-6
    for one, other in zip(together, apart, strict=True):
        is_same = torch.allclose(one, other, rtol=tolerance, atol=0.0, equal_nan=True)
        if not is_same:
            return "what it does to one parameter depends on others"
    return None


def granularity(optimizer: Optimizer) -> tuple[Granularity, str]:
    """What ``optimizer`` treats by itself, and why it is not finer.

    Parts of parameters are tried with the numbers of dimensions, types and devices of the optimizer's own.
    """
    why = why_not_one_by_one(optimizer)
    if why is not None:
        return Granularity.NONE, why
    for trial in _trials(optimizer):
        try:
            expected = trial.stepped()
        except Exception as error:
            return Granularity.NONE, _failure("its step", error)
        why = _differs_in_parts(trial, expected)
        if why is not None:
            return Granularity.PARAMETER, why
    return Granularity.ELEMENT, ""


def _failure(what: str, error: Exception) -> str:
    return f"a trial of {what} failed with {type(error).__name__}: {error}"


# ---- all parameters, and halves of them ----


def _whole_and_halves(optimizer: Optimizer, in_double: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Values of small parameters behind some steps on all of them, and behind steps on each half."""
    count = len(_parameters(optimizer))
    if count == 1:  # what depends on other parameters shows with two only: `_stepped` adds one
        count = 2
    half = count // 2
    together = _stepped(optimizer, range(count), in_double)
    first = _stepped(optimizer, range(half), in_double)
    second = _stepped(optimizer, range(half, count), in_double)
    return together, first + second


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _stepped(optimizer: Optimizer, chosen: range, in_double: bool) -> list[Tensor]:
    """The values of the ``chosen`` parameters of a small copy after some steps on them alone."""
    originals = _parameters(optimizer)
    small = [_small(parameter, number, in_double) for number, parameter in enumerate(originals)]
    stand_ins = {id(original): copied for original, copied in zip(originals, small, strict=True)}
    clone = copy_with(optimizer, stand_ins)
    if chosen.stop > len(small):  # a second one beside the only one
        second = _small(originals[0], 1, in_double)
        small.append(second)
        (group,) = [group for group in clone.param_groups if group["params"]]
        group["params"].append(second)
    stepped = [small[number] for number in chosen]
    kept = {id(parameter) for parameter in stepped}
    for group in clone.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
    # All gradients are made before the first step: they depend on the values that parameters begin with.
    gradients = []
    for step in range(_STEPS):
        gradients.append([_gradient(small[number], number, step) for number in chosen])
    _step(clone, stepped, gradients)
    return [parameter.detach() for parameter in stepped]


def _small(parameter: Tensor, number: int, in_double: bool) -> nn.Parameter:
    """A parameter of as many dimensions."""
    shape = [min(size, _LARGEST) for size in parameter.shape]
    values = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64)
    values = values.reshape(shape) + 0.1 * number
    if not in_double:
        device = parameter.device
        if parameter.is_meta:
            device = _CPU
        values = values.to(device, parameter.dtype)
    return nn.Parameter(values, parameter.requires_grad)


def _gradient(parameter: Tensor, number: int, step: int) -> Tensor:
    """From small to so large that each limit of a norm is passed, and of another size for each parameter.

    First they change their direction, then they keep it: some optimizers take larger steps by how far they have gone.
    """
    shift = step if step < _STEPS // 2 else 0
    waves = (parameter.detach() * 3 + shift).cos()
    power = 2 * (step % 6) - 4  # from -4 to 6
    return waves * (1.0 + number) * 10.0**power


# ---- a parameter, and parts of it ----


@dataclass(frozen=True)
class _Trial:
    """A parameter of a kind that an optimizer has, to be stepped as a whole and in parts.

    Attributes:
        optimizer: the user's.
        group: number of the group that the parameter is in.
        original: the optimizer's first parameter of this kind.
    """

    optimizer: Optimizer
    group: int
    original: nn.Parameter

    @property
    def ndim(self) -> int:
        """Dimensions of the trial: as many as the original has, up to the most that are tried."""
        return min(self.original.ndim, max(_SHAPES))

    def stepped(self, low: int = 0, high: int | None = None) -> Tensor:
        """The parameter behind some steps; with ``low`` and ``high`` a part of it, in one dimension."""
        # The same numbers for each trial of this shape: a part has the values and gradients of its place in the whole.
        whole = torch.randn(_SHAPES[self.ndim], generator=torch.Generator().manual_seed(self.ndim))
        parameter = nn.Parameter(self._part(whole, low, high))
        gradients = []
        for step in range(_STEPS):
            gradient = _trial_gradient(whole, step)
            gradients.append([self._part(gradient, low, high)])

        # All other parameters get small stand-ins, wherever the optimizer may hold them, and are in no group.
        stand_ins: dict[int, nn.Parameter] = {}
        for other in _parameters(self.optimizer):
            stand_ins[id(other)] = _small(other, 0, in_double=False)
        stand_ins[id(self.original)] = parameter
        clone = copy_with(self.optimizer, stand_ins)
        for group in clone.param_groups:
            group["params"] = []
        clone.param_groups[self.group]["params"] = [parameter]
        _step(clone, [parameter], gradients)
        return parameter.detach()

    def _part(self, whole: Tensor, low: int, high: int | None) -> Tensor:
        """A copy in the original's type, on its device; without ``high`` of all of it, in its shape."""
        part = whole
        if high is not None:
            part = whole.reshape(-1)[low:high]
        return part.to(self.original.device, self.original.dtype, copy=True)


def _trials(optimizer: Optimizer) -> list[_Trial]:
    """One for each group, number of dimensions, type and device."""
    trials: dict[Any, _Trial] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            trial = _Trial(optimizer, number, parameter)
            trials.setdefault((number, trial.ndim, parameter.dtype, parameter.device), trial)
    return list(trials.values())


def _trial_gradient(like: Tensor, step: int) -> Tensor:
    """The same for each trial, of very different sizes from step to step."""
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(step))
    power = step % 5 - 2
    return values * 10.0**power


def _differs_in_parts(trial: _Trial, expected: Tensor) -> str | None:
    """Why a parameter in two parts, of which one rank has one, is not stepped as the whole; None if it is."""
    flat = expected.reshape(-1)
    count = flat.numel()
    cut = count * 2 // 5
    for low, high in ((0, cut), (cut, count)):
        if low == high:
            continue
        try:
            part = trial.stepped(low, high)
        except Exception as error:
            return _failure("a step on a part of a parameter", error)
        if not _equal(part, flat[low:high]):
            return (
                f"a part of a parameter is stepped in another way than the whole ({trial.ndim} dimensions, "
                f"{trial.original.dtype})"
            )
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    """Up to the last bits, which differ where a vector's end is computed element by element."""
    tolerance = 1e-2
    if one.dtype in (torch.float32, torch.float64):
        tolerance = 1e-6
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- copies ----


def _step(clone: Any, parameters: Sequence[nn.Parameter], gradients: Sequence[Sequence[Tensor]]) -> None:
    """Step with one set of gradients after the other: for each step one for each of the ``parameters``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for of_step in gradients:
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient
            type(clone).step(clone)


def copy_with(optimizer: Optimizer, parameters: dict[int, nn.Parameter]) -> Any:
    """A copy of ``optimizer`` in its first state, without hooks, with other parameters, and a learning rate not zero.

    Args:
        optimizer: the user's.
        parameters: what stands in for each, also where attributes hold them, by the ``id`` of the optimizer's own.
    """
    # `deepcopy` takes what its memo has for an object's `id` instead of copying it. So the copy has the stand-ins, an
    # empty state and itself wherever the optimizer's attributes lead to parameters, the state or the optimizer.
    memo: dict[int, Any] = dict(parameters)
    memo[id(optimizer.state)] = defaultdict(dict)
    clone = object.__new__(type(optimizer))
    memo[id(optimizer)] = clone
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):  # hooks, as torch names them
            vars(clone)[name] = OrderedDict()
        elif name != "step":  # a scheduler's, bound to the original
            vars(clone)[name] = copy.deepcopy(value, memo)
    for group in clone.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = torch.full_like(rate, max(float(rate), _LEARNING_RATE))
        elif rate is not None:
            group["lr"] = max(rate, _LEARNING_RATE)
    return clone
