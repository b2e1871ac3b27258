"""Calls of ``self.log`` and of metrics in the micro-batches of a batch, made once for the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmetrics import Metric

from lightning_smddp._compat.torch import forward_cache
from lightning_smddp.bridge.logged_values import (
    Log,
    Rule,
    is_loss,
    reduce_exponentials,
    reduce_losses,
    reduce_values,
    whole_batch_size,
)
from lightning_smddp.bridge.metrics import AnyMetric, MetricCall, members, merged_arguments, owners
from lightning_smddp.bridge.step_attributes import detached
from lightning_smddp.bridge.step_records import Key, Logged, Record, Returned
from lightning_smddp.wire.pytree import leaves


@dataclass
class BatchEvents:
    """What calls came to for a batch.

    Attributes:
        logs: calls of ``self.log``.
        progress: update counts and forward caches of metrics, by name.
        returned: results of metrics, by call.
    """

    logs: list[Log] = field(default_factory=list)
    progress: dict[str, tuple[int, Any]] = field(default_factory=dict)
    returned: Returned = field(default_factory=dict)


class EventCombiner:
    """Combines the calls of the batches of a run.

    Args:
        rules: by logged name or metric attribute, how values of micro-batches become the batch's; more may be added.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self._batch_sizes: dict[str, int] = {}  # by logged name: one that is passed whatever the batch

    def combine(self, records: Sequence[Record], metrics: Mapping[str, AnyMetric]) -> BatchEvents:
        """Make each call of a metric, and combine each call of ``self.log``, once for the batch.

        Raises:
            UncombinableError: there is no rule for the arguments of a metric. No metric has been updated then.
        """
        found = BatchEvents()
        called = set()
        # Arguments of all calls first, as that raises before any metric is updated. Then the calls in the order of the
        # step, as what one returned may have been logged by a later one.
        merged = self._merge_calls(records)
        for key in _merged_order([list(record.events) for record in records]):
            of_key = [record for record in records if key in record.events]
            first = of_key[0].events[key]
            if isinstance(first, MetricCall):
                args, kwargs = merged[key]
                result = _function(metrics[first.metric], first.method)(*args, **kwargs)
                found.returned[key] = leaves(detached(result))
                called.add(first.metric)
            else:
                logs = [record.events[key] for record in of_key]
                sizes = [record.size for record in of_key]
                log = self._combine_logs(logs, sizes, metrics, found.returned)
                found.logs.append(log)
        found.progress = _progress(called, metrics)
        return found

    def _merge_calls(self, records: Sequence[Record]) -> dict[Key, tuple[Any, Any]]:
        """Arguments of all calls of metrics for the batch."""
        calls: dict[Key, list[MetricCall]] = {}
        sizes: dict[Key, list[int]] = {}
        for record in records:
            for key, event in record.events.items():
                if isinstance(event, MetricCall):
                    calls.setdefault(key, []).append(event)
                    sizes.setdefault(key, []).append(record.size)
        merged = {}
        for key, of_key in calls.items():
            rule = self.rules.get(of_key[0].metric)
            merged[key] = merged_arguments(of_key, sizes[key], rule)
        return merged

    def _combine_logs(
        self,
        logs: Sequence[Any],
        sizes: Sequence[int],
        metrics: Mapping[str, AnyMetric],
        returned: Returned,
    ) -> Log:
        """One call of ``self.log`` for the batch, of those of micro-batches; ``returned``: what metrics gave for it."""
        first: Logged = logs[0]
        options = dict(first.options)
        weights: Sequence[float] = sizes
        if options.get("batch_size") is not None:
            given = [int(log.options["batch_size"]) for log in logs]
            options["batch_size"] = self._whole_batch_size(first.name, given, sizes)
            if len(set(given)) > 1:  # what the value is a mean over
                weights = given
        if first.metric is not None:
            metric = metrics[first.metric]
            assert isinstance(metric, Metric)
            cache = detached(forward_cache(metric))
            return Log(first.name, None, first.metric, cache, options)
        # A value that a metric returned is the batch's already, if it is of the same call in all micro-batches.
        if first.source is not None and all(log.source == first.source for log in logs):
            key, position = first.source
            return Log(first.name, returned[key][position], None, None, options, is_whole=True)
        # A rule that the user gave or a trial has found goes before `reduce_fx`; a mean that is called a loss is
        # weighted as the loss is, which need not be by rows.
        rule = self.rules.get(first.name)
        if rule is None:
            rule = options["reduce_fx"]
            if rule == "mean" and is_loss(first.name):
                rule = "loss"
        values = [log.value for log in logs]
        of_losses = [log.weight for log in logs]
        if rule == "loss":
            value = reduce_losses(values, of_losses)
        elif rule == "exp":
            value = reduce_exponentials(values, of_losses)
        else:
            value = reduce_values(rule, values, weights)
        return Log(first.name, value, None, None, options)

    def _whole_batch_size(self, name: str, given: Sequence[int], sizes: Sequence[int]) -> int:
        """What would have been passed as ``batch_size`` for the batch."""
        size, constant = whole_batch_size(given, sizes, self._batch_sizes.get(name))
        if constant is not None:
            self._batch_sizes[name] = constant
        return size


def _function(metric: AnyMetric, method: str) -> Callable[..., Any]:
    if method == "forward":
        return metric  # with its hooks
    function: Callable[..., Any] = getattr(metric, method)
    return function


def _progress(called: set[str], metrics: Mapping[str, AnyMetric]) -> dict[str, tuple[int, Any]]:
    """Update counts and forward caches of all metrics that share a collection or wrapper with a called one."""
    owner_of = owners(metrics)
    progress = {}
    for owner in dict.fromkeys(owner_of[name] for name in sorted(called)):
        for name, metric in members(metrics[owner]).items():
            path = owner
            if name:
                path = f"{owner}.{name}"
            progress[path] = (metric.update_count, detached(forward_cache(metric)))
    return progress


def _merged_order(sequences: Sequence[Sequence[Key]]) -> list[Key]:
    """All keys, in an order that keeps to that of each sequence where they agree.

    A call that only some micro-batches make comes behind the one that it followed there: [a, c] and [a, b] give
    [a, b, c].
    """
    merged: list[Key] = []
    for sequence in sequences:
        position = 0
        for key in sequence:
            if key in merged:
                position = merged.index(key) + 1
            else:
                merged.insert(position, key)
                position += 1
    return merged
