"""How logged values of micro-batches make up the batch's, learned from a few rows of the first batch.

``reduce_fx`` says how Lightning reduces values of *batches*. A mean over rows that is logged with ``reduce_fx="max"``
is still a mean over the micro-batches' rows; a count that is logged with the default is their sum; a perplexity is the
exponential of a mean. What is right shows when the step is run on some rows at once, and on their halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from lightning_smddp.bridge.step_results import Log, StepResults
from lightning_smddp.bridge.step_values import (
    Rule,
    is_loss,
    reduce_exponentials,
    reduce_losses,
    reduce_values,
    reduction_name,
)
from lightning_smddp.pipeline.partition.microbatches import MicroBatch

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
    whole: StepResults, parts: Sequence[StepResults], microbatches: Sequence[MicroBatch], by_rows: bool = False
) -> Learned:
    """How each logged number of a batch comes out of those of its micro-batches.

    Args:
        whole: of some rows.
        parts: of consecutive parts of these rows.
        microbatches: the parts, weighted as losses are.
        by_rows: losses are weighted by rows, so that they are usual means.
    """
    learned = Learned()
    if len(parts) < 2:
        return learned  # all rules are the same for one
    values, sizes = [_numbers(part.logs) for part in parts], [microbatch.size for microbatch in microbatches]
    weights = [microbatch.weight for microbatch in microbatches]
    for log in whole.logs:
        expected = _number(log)
        if expected is None or any(log.name not in part for part in values):
            continue
        given = [part[log.name] for part in values]
        declared: Rule = reduction_name(log.options.get("reduce_fx", "mean")) or "mean"
        if declared == "mean" and is_loss(log.name):
            declared = "loss"
        # Where several are right, as for what is zero at first: a sum is likely a count, anything else a mean.
        first: Rule = declared if declared in ("sum", "loss") else "mean"
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
    return max(made) - min(made) > _SAME * max(map(abs, made)) or any(map(math.isnan, made))


def _reduced(rule: Rule, values: Sequence[float], sizes: Sequence[int], weights: Sequence[float]) -> float:
    if rule == "exp":
        return math.nan if min(values) <= 0 else float(reduce_exponentials(values, weights))
    return float(reduce_losses(values, weights) if rule == "loss" else reduce_values(rule, values, sizes))


def _numbers(logs: Sequence[Log]) -> dict[str, float]:
    return {log.name: value for log in logs if (value := _number(log)) is not None}


def _number(log: Log) -> float | None:
    return None if log.metric is not None or log.is_whole else _plain(log.value)


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
