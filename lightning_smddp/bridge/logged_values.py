"""How the values that a step logs for micro-batches become one for the batch, and how that is learned.

``reduce_fx`` says how Lightning reduces values of *batches*. A mean over rows that is logged with ``reduce_fx="max"``
is still a mean over the micro-batches' rows; a count that is logged with the default is their sum; a perplexity is the
exponential of a mean. What is right shows when the step is run on some rows of the first batch at once, and on their
halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.partition.microbatches import MicroBatch

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
    return next((rule for function, rule in _REDUCTIONS if function is reduce_fx), None)


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
        return _as_first(values, reduce_values(of_squares, squares, weights) ** 0.5)
    # A micro-batch of weight 0 (all of its labels ignored, say) has nan for its loss, and nan * 0 is nan: it is left
    # out. Where all weigh 0, they weigh the same.
    if rule == "mean" and any(weights) and not all(weights):
        weighted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
        values, weights = zip(*weighted, strict=True)
    if rule == "mean" and not any(weights):
        weights = [1.0] * len(values)
    if not any(isinstance(value, Tensor) for value in values):
        return _reduce_numbers(rule, values, weights)
    device = next(value.device for value in values if isinstance(value, Tensor))
    parts = [torch.as_tensor(value, device=device).squeeze() for value in values]
    stacked = torch.stack(parts)
    if rule == "sum":
        return stacked.sum()
    if rule == "max":
        return stacked.amax()
    if rule != "mean":
        return stacked.amin()
    dtype = torch.float32
    if stacked.dtype == torch.float64:
        dtype = torch.float64
    precise = _most_precise(device)
    shares = from_numbers(weights, precise, device)
    return ((stacked.to(precise) * shares).sum() / sum(weights)).to(dtype)


def _reduce_numbers(rule: Rule, values: Sequence[Any], weights: Sequence[float]) -> Any:
    if rule == "mean":
        if all(value == values[0] for value in values):
            return values[0]
        return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
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
    if len(set(given)) == 1 and (given[0] == constant or (given[0] == sum(sizes) and len(sizes) > 1)):
        return given[0], given[0]
    return sum(given), constant


_RULES: tuple[Rule, ...] = ("mean", "loss", "sum", "max", "min", "exp", "rms", "norm")
_TOLERANCE = 1e-5
_SAME = 2e-6  # relative: rules that differ by less need not be told from each other
Doubts: TypeAlias = dict[str, list[Rule]]
Values: TypeAlias = "tuple[list[Any], list[int], list[float]]"  # of micro-batches: logged values, rows, weights


@dataclass
class Learned:
    """Rules by name; ``doubts`` are names whose values were so alike that several rules are right."""

    rules: dict[str, Rule] = field(default_factory=dict)
    doubts: Doubts = field(default_factory=dict)


def learn_rules(
    whole: Sequence[Log], parts: Sequence[Sequence[Log]], microbatches: Sequence[MicroBatch], by_rows: bool = False
) -> Learned:
    """How each logged number of a batch comes out of those of its micro-batches.

    Args:
        whole: what was logged for some rows.
        parts: and for consecutive parts of these rows.
        microbatches: the parts, weighted as losses are.
        by_rows: losses are weighted by rows, so that they are usual means.
    """
    learned = Learned()
    if len(parts) < 2:
        return learned  # all rules are the same for one
    values, sizes = [_numbers(part) for part in parts], [microbatch.size for microbatch in microbatches]
    weights = [microbatch.weight for microbatch in microbatches]
    for log in whole:
        expected = _number(log)
        if expected is None or any(log.name not in part for part in values):
            continue
        given = [part[log.name] for part in values]
        # Each rule makes a number of the parts' numbers; those that make the whole's number are right. Where several
        # are, as for what is zero at first: a sum is likely a count, anything else a mean.
        declared: Rule = reduction_name(log.options.get("reduce_fx", "mean")) or "mean"
        if declared == "mean" and is_loss(log.name):
            declared = "loss"
        first: Rule = "mean"
        if declared in ("sum", "loss"):
            first = declared
        made = {rule: _reduced(rule, given, sizes, weights) for rule in _RULES}
        right = [rule for rule in (first, declared, *_RULES) if _close(expected, made[rule])]
        if right:
            learned.rules[log.name] = right[0]
        others = [rule for rule in dict.fromkeys(right) if not (by_rows and rule == "loss")]
        if len(others) > 1:
            learned.doubts[log.name] = others
    return learned


def disagree(rules: Sequence[Rule], values: Values) -> bool:
    """Whether it makes a difference which of the rules is right."""
    numbers = [number for value in values[0] if (number := _plain(value)) is not None]
    if len(numbers) < 2 or len(numbers) != len(values[0]):
        return False
    made = [_reduced(rule, numbers, values[1], values[2]) for rule in rules]
    spread, largest = max(made) - min(made), max(map(abs, made))
    return spread > _SAME * largest or any(map(math.isnan, made))


def _reduced(rule: Rule, values: Sequence[float], sizes: Sequence[int], weights: Sequence[float]) -> float:
    if rule == "exp":
        if min(values) <= 0:
            return math.nan  # it is no exponential
        return float(reduce_exponentials(values, weights))
    if rule == "loss":
        return float(reduce_losses(values, weights))
    return float(reduce_values(rule, values, sizes))


def _numbers(logs: Sequence[Log]) -> dict[str, float]:
    """By name, what was logged that is a number; of several calls the last."""
    found = {}
    for log in logs:
        value = _number(log)
        if value is not None:
            found[log.name] = value
    return found


def _number(log: Log) -> float | None:
    """None for metrics and what they returned: those see the whole batch, so they need no rule."""
    if log.metric is not None or log.is_whole:
        return None
    return _plain(log.value)


def _plain(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    if isinstance(value, Tensor) and value.numel() != 1:
        return None
    return float(value)


def _close(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-8)
