"""How logged values of micro-batches make up the batch's, learned from a few rows of the first batch.

``reduce_fx`` says how Lightning reduces values of *batches*. A mean over rows that is logged with ``reduce_fx="max"``
is still a mean over the micro-batches' rows; a count that is logged with the default is their sum. What is right
shows when the step is run on some rows at once, and on their halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_smddp.strategies.step_capture import is_loss
from lightning_smddp.strategies.step_results import Log, StepResults
from lightning_smddp.strategies.step_values import Rule, reduce_values, reduction_name

_RULES: tuple[Rule, ...] = ("mean", "sum", "max", "min")
_TOLERANCE = 1e-5


def learn_rules(whole: StepResults, parts: Sequence[StepResults], sizes: Sequence[int]) -> dict[str, Rule]:
    """Rules for the names where what ``reduce_fx`` says is wrong and another rule is right.

    Args:
        whole: of some rows.
        parts: of consecutive parts of these rows.
        sizes: rows of each part.
    """
    rules: dict[str, Rule] = {}
    values = [_numbers(part.logs) for part in parts]
    for log in whole.logs:
        expected = _number(log)
        if expected is None or is_loss(log.name) or any(log.name not in part for part in values):
            continue
        declared = reduction_name(log.options.get("reduce_fx", "mean")) or "mean"
        given = [part[log.name] for part in values]
        # Where several are right, as for what is zero at first: a sum is likely a count, anything else a mean.
        first: Rule = "sum" if declared == "sum" else "mean"
        right = [rule for rule in (first, declared, *_RULES) if _close(expected, reduce_values(rule, given, sizes))]
        if right and right[0] != declared:
            rules[log.name] = right[0]
    return rules


def _numbers(logs: Sequence[Log]) -> dict[str, float]:
    return {log.name: value for log in logs if (value := _number(log)) is not None}


def _number(log: Log) -> float | None:
    value: Any = log.value
    if log.metric is not None or isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    if isinstance(value, Tensor) and value.numel() != 1:
        return None
    return float(value)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-8)
