"""How logged values of micro-batches make up the batch's, learned from a few rows of the first batch.

``reduce_fx`` says how Lightning reduces values of *batches*. A mean over rows that is logged with ``reduce_fx="max"``
is still a mean over the micro-batches' rows; a count that is logged with the default is their sum. What is right
shows when the step is run on some rows at once, and on their halves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_smddp.pipeline.microbatches import MicroBatch
from lightning_smddp.strategies.step_results import Log, StepResults
from lightning_smddp.strategies.step_values import Rule, is_loss, reduce_losses, reduce_values, reduction_name

_RULES: tuple[Rule, ...] = ("mean", "loss", "sum", "max", "min")
_TOLERANCE = 1e-5
_CLEAR = 1e-3  # relative: what differs by less may be rounding


@dataclass
class Learned:
    """Rules for names where what ``reduce_fx`` says is wrong and another rule is right.

    ``unfit`` are names for which none is: the value of some rows, and what their halves' values make.
    """

    rules: dict[str, Rule] = field(default_factory=dict)
    unfit: dict[str, tuple[float, float]] = field(default_factory=dict)

    def warning(self, known: Mapping[str, Any] | None = None) -> str | None:
        """What to say about those that fit no rule, but for ``known`` ones."""
        new = {name: values for name, values in self.unfit.items() if name not in (known or {})}
        if not new:
            return None
        texts = [f"{name!r} is {whole:.6g} for some rows, but {made:.6g}" for name, (whole, made) in new.items()]
        more = f" ... ({len(texts) - 4} more)" if len(texts) > 4 else ""
        return (
            f"Logged values that a batch cannot get from its micro-batches: {'; '.join(texts[:4])}{more} if it is "
            "combined from their halves. It is no mean, sum, largest or smallest value of theirs, and what is logged "
            "differs from one process. Compute it by a torchmetrics object, which sees whole batches, or use "
            "num_microbatches=1."
        )


def learn_rules(
    whole: StepResults, parts: Sequence[StepResults], microbatches: Sequence[MicroBatch], again: StepResults
) -> Learned:
    """How each logged number of a batch comes out of those of its micro-batches.

    Args:
        whole: of some rows.
        parts: of consecutive parts of these rows.
        microbatches: the parts, weighted as losses are.
        again: of the same rows as ``whole``: numbers that chance has a part in are told by it.
    """
    learned = Learned()
    if len(parts) < 2:
        return learned  # all rules are the same for one
    values, repeated = [_numbers(part.logs) for part in parts], _numbers(again.logs)
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
        made = {rule: _reduced(rule, given, microbatches) for rule in _RULES}
        right = [rule for rule in (first, declared, *_RULES) if _close(expected, made[rule], _TOLERANCE)]
        if right and right[0] != declared:
            learned.rules[log.name] = right[0]
        is_steady = _close(expected, repeated.get(log.name, math.nan), _TOLERANCE)
        if not right and is_steady and not _close(expected, made[declared], _CLEAR):
            learned.unfit[log.name] = (expected, made[declared])
    return learned


def _reduced(rule: Rule, values: Sequence[float], microbatches: Sequence[MicroBatch]) -> float:
    if rule == "loss":
        return float(reduce_losses(values, [microbatch.weight for microbatch in microbatches]))
    return float(reduce_values(rule, values, [microbatch.size for microbatch in microbatches]))


def _numbers(logs: Sequence[Log]) -> dict[str, float]:
    return {log.name: value for log in logs if (value := _number(log)) is not None}


def _number(log: Log) -> float | None:
    value: Any = log.value
    if log.metric is not None or log.is_whole or isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    if isinstance(value, Tensor) and value.numel() != 1:
        return None
    return float(value)


def _close(one: float, other: float, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-8)
