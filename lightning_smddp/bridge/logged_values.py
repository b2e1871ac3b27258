"""How the values that a step logs for micro-batches become one for the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.communication.host_numbers import from_numbers

# "loss": weighted as losses are; "exp": the exponential of what is weighted so (perplexity); "rms" and "norm": roots of
# the mean and of the sum of squares.
Rule: TypeAlias = Literal["mean", "sum", "max", "min", "last", "loss", "exp", "rms", "norm"]
_REDUCTIONS: list[tuple[Callable[..., Any], Rule]] = [
    (torch.mean, "mean"),
    (torch.sum, "sum"),
    (torch.max, "max"),
    (torch.min, "min"),
    (sum, "sum"),
    (max, "max"),
    (min, "min"),
]
_BY_NAME: dict[str, Rule] = {"avg": "mean", "mean": "mean", "sum": "sum", "max": "max", "min": "min"}


@dataclass
class Log:
    """One call of ``self.log``: the value, or the name of the metric that was logged and what it showed then.

    ``is_whole`` if the value is what a metric returned for the whole batch.
    """

    name: str
    value: Any
    metric: str | None
    cache: Any
    options: dict[str, Any]
    is_whole: bool = False


def reduction_name(reduce_fx: Any) -> Rule | None:
    """The name of a ``reduce_fx`` that Lightning accepts, else None."""
    if isinstance(reduce_fx, str):
        return _BY_NAME.get(reduce_fx.lower())
    for function, rule in _REDUCTIONS:
        if function is reduce_fx:
            return rule
    return None


def reduce_values(rule: Rule, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """One value out of those of micro-batches: numbers, or tensors with one element.

    A mean is taken in double precision, so that the mean of equal values is that value. It is floating-point, also of
    integers.
    """
    if rule == "last":
        return values[-1]
    if rule in ("rms", "norm"):
        squares = [_precise(value) ** 2 for value in values]
        of_squares: Rule = "sum"
        if rule == "rms":
            of_squares = "mean"
        root = reduce_values(of_squares, squares, weights) ** 0.5
        return _as_first(values, root)
    if rule == "mean":
        values, weights = _without_weightless(values, weights)
    devices = [value.device for value in values if isinstance(value, Tensor)]
    if devices:
        return _reduce_tensors(rule, values, weights, devices[0])
    return _reduce_numbers(rule, values, weights)


def _without_weightless(values: Sequence[Any], weights: Sequence[float]) -> tuple[Sequence[Any], Sequence[float]]:
    """Both but for micro-batches of weight 0; where all weigh 0, they weigh the same.

    A micro-batch whose labels are all ignored, say, has weight 0 and nan for its loss, and nan * 0 is nan.
    """
    if all(weights):
        return values, weights
    if not any(weights):
        return values, [1.0] * len(values)
    kept, their_weights = [], []
    for value, weight in zip(values, weights, strict=True):
        if weight:
            kept.append(value)
            their_weights.append(weight)
    return kept, their_weights


def _reduce_tensors(rule: Rule, values: Sequence[Any], weights: Sequence[float], device: torch.device) -> Tensor:
    parts = [torch.as_tensor(value, device=device).squeeze() for value in values]
    stacked = torch.stack(parts)
    if rule == "sum":
        return stacked.sum()
    if rule == "max":
        return stacked.amax()
    if rule == "min":
        return stacked.amin()
    # The weights go to the device as one tensor of double precision, where the device has that; the mean has single
    # precision, also of values in 16 bits, unless the values have more.
    dtype = torch.float32
    if stacked.dtype == torch.float64:
        dtype = torch.float64
    precise = _most_precise(device)
    shares = from_numbers(weights, precise, device)
    total = (stacked.to(precise) * shares).sum()
    return (total / sum(weights)).to(dtype)


def _reduce_numbers(rule: Rule, values: Sequence[Any], weights: Sequence[float]) -> Any:
    if rule == "mean":
        if all(value == values[0] for value in values):
            return values[0]
        weighted = [value * weight for value, weight in zip(values, weights, strict=True)]
        return math.fsum(weighted) / sum(weights)
    if rule == "sum":
        return sum(values)
    if rule == "max":
        return max(values)
    return min(values)


def reduce_losses(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The batch's loss out of those of micro-batches: their mean by weight, or their sum where each weighs 1."""
    if len(values) > 1 and all(weight == 1.0 for weight in weights):
        return reduce_values("sum", values, weights)
    return reduce_values("mean", values, weights)


def reduce_exponentials(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The batch's value where the logarithms of the values are losses."""
    logarithms = [_precise(value).log() for value in values]
    return _as_first(values, reduce_losses(logarithms, weights).exp())


def _most_precise(device: torch.device) -> torch.dtype:
    """The floating-point type that has the most bits there."""
    if device.type == "mps":
        return torch.float32
    return torch.float64


def _precise(value: Any) -> Tensor:
    """``value`` in double precision, where there is one."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value.squeeze().to(_most_precise(value.device))


def _as_first(values: Sequence[Any], result: Tensor) -> Any:
    """``result`` as a number if ``values`` are numbers, else with the type of the first floating-point tensor."""
    if not any(isinstance(value, Tensor) for value in values):
        return result.item()
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return result.to(value.dtype)
    return result.to(torch.float32)


def is_loss(name: object) -> bool:
    """Whether a value of that name is taken for a loss, which is weighted as the loss is."""
    return isinstance(name, str) and "loss" in name.lower()


def whole_batch_size(given: Sequence[int], sizes: Sequence[int], constant: int | None) -> tuple[int, int | None]:
    """What ``self.log(batch_size=...)`` would have been for the batch.

    Args:
        given: for each micro-batch.
        sizes: rows of each micro-batch.
        constant: what an earlier step has shown to be passed whatever the batch.

    Returns:
        The sum of ``given``; or ``given`` itself where a number is passed that does not depend on the micro-batch,
        which shows when it is the whole batch's size. And that number, if so.
    """
    # A number that is the whole batch's size was passed for each micro-batch without a look at it; from then on it is
    # known to be a constant, also for a last batch that is smaller.
    first = given[0]
    is_whole_size = first == sum(sizes) and len(sizes) > 1
    if len(set(given)) == 1 and (first == constant or is_whole_size):
        return first, first
    return sum(given), constant
