"""Keeps a step that is repeated for micro-batches from Lightning, and combines what it did.

Lightning expects one ``training_step`` for a batch; the pipeline runs it once for each micro-batch. While it runs,
calls of ``self.log`` and of metrics go to a record of that micro-batch, and attributes that it sets are set back::

    micro-batch 0:  log("loss", 2.0)  accuracy(p0, y0)  self.seen = 8   -> _Record 0
    micro-batch 1:  log("loss", 4.0)  accuracy(p1, y1)  self.seen = 8   -> _Record 1
    the batch:      log("loss", 3.0)  accuracy(p, y)    self.seen = 16  <- StepCapture.results

What the step logged, updated and set is captured here; ``pipeline/capture/`` is about which operations it consists of.
"""

from __future__ import annotations

import inspect
import numbers
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torchmetrics import Metric

from lightning_smddp._compat.torch import forward_cache, without_torch_functions
from lightning_smddp.bridge.attribute_counts import (
    UNKNOWN,
    Moved,
    doubtful_counts,
    settle_counts,
    unsettled_counts,
)
from lightning_smddp.bridge.combined_changes import combine_changes
from lightning_smddp.bridge.left_behind import LeftBehind
from lightning_smddp.bridge.left_notes import without_remote
from lightning_smddp.bridge.logged_values import (
    Log,
    Rule,
    is_loss,
    reduce_exponentials,
    reduce_losses,
    reduce_values,
    reduction_name,
    whole_batch_size,
)
from lightning_smddp.bridge.metrics import (
    AnyMetric,
    MetricCall,
    MetricRecorder,
    PipelineMetrics,
    members,
    merged_arguments,
    named_metrics,
    owners,
    patched,
)
from lightning_smddp.bridge.step_attributes import AttributeWatch, AttrPath, Changes, detached
from lightning_smddp.bridge.step_results import Observed, StepResults
from lightning_smddp.pipeline.partition.microbatches import UncombinableError, combine
from lightning_smddp.wire.pytree import Path, copied, leaves, map_leaves

_Key: TypeAlias = tuple[Hashable, ...]  # what was called, and how often before in this micro-batch
_Returned: TypeAlias = dict[_Key, list[Any]]  # by call of a metric, the leaves of its result for the batch


@dataclass
class _Logged:
    """A call of ``self.log`` in a micro-batch; ``source`` is the metric call and the leaf that the value came from."""

    name: str
    value: Any
    metric: str | None
    source: tuple[_Key, int] | None
    options: dict[str, Any]
    weight: float


@dataclass
class _Record:
    """What a step did on one micro-batch.

    Attributes:
        size: its rows.
        weight: of its losses.
        events: calls of ``self.log`` and of metrics, in order. The n-th call for a name has the same key in each
            micro-batch, so that the calls that belong together are found by their keys.
        sources: of which call of a metric, and which leaf of its result, a tensor is; by the tensor's id.
        touched: values that are needed after the step's end, still on the graph.
        changes: of the module's attributes.
        counts: calls so far, by what was called.
    """

    size: int
    weight: float
    events: dict[_Key, _Logged | MetricCall] = field(default_factory=dict)
    sources: dict[int, tuple[_Key, int]] = field(default_factory=dict)
    touched: list[Any] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    counts: Counter[_Key] = field(default_factory=Counter)

    def add_call(self, call: MetricCall) -> None:
        """Remember the call of a metric, and which tensors stand for what it returned."""
        key = self._add(("call", call.metric, call.method), call)
        self.touched += leaves((call.args, call.kwargs))
        # What the metric shows for these rows alone says nothing of the batch. Wherever this very object turns up
        # later (logged, set or returned), it is replaced by what the metric returns for the whole batch.
        for position, leaf in enumerate(leaves(call.result)):
            if isinstance(leaf, Tensor):
                self.sources[id(leaf)] = (key, position)

    def add_log(self, name: str, value: Any, metric: str | None, options: dict[str, Any]) -> None:
        """Remember a logged value as it is now: a copy, a number, or only that a metric is logged."""
        self.touched.append(value)
        source = self.sources.get(id(value))
        if isinstance(value, Tensor):
            value = value.detach().clone()
        elif hasattr(value, "item"):
            value = value.item()
        if metric:
            value = None  # the metric itself is logged for the batch
        self._add(("log", name), _Logged(name, value, metric, source, options, self.weight))

    def close(self, changes: Changes) -> None:
        """The micro-batch is over: keep ``changes``, and let go of the autograd graph."""
        self.touched.clear()
        self.changes = changes
        for event in self.events.values():
            if isinstance(event, MetricCall):
                event.args, event.kwargs = detached((event.args, event.kwargs))

    def apply(self, function: Callable[[Any], Any]) -> None:
        """Replace all values by what ``function`` makes of them."""
        for event in self.events.values():
            if isinstance(event, MetricCall):
                event.args, event.kwargs = function(event.args), function(event.kwargs)
            else:
                event.value = function(event.value)
        self.changes = function(self.changes)

    def _add(self, what: _Key, event: _Logged | MetricCall) -> _Key:
        key = (*what, self.counts[what])
        self.counts[what] += 1
        self.events[key] = event
        return key


class StepCapture:
    """Runs a step on micro-batches without Lightning seeing it, and combines what it did.

    While a micro-batch runs, ``module.log`` and the module's metrics are patched; nothing is afterwards.

    Args:
        module: the LightningModule.
        rules: by logged name or metric attribute, how values of micro-batches become the batch's, instead of what
            ``reduce_fx`` says.
        metrics: those of this rank's pipeline; None where there is one process.
    """

    def __init__(
        self, module: Any, rules: Mapping[str, Rule] | None = None, metrics: PipelineMetrics | None = None
    ) -> None:
        self.module, self.rules, self.pipeline_metrics = module, dict(rules or {}), metrics
        base: Any = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
        self._ignored = frozenset(vars(base()))  # Lightning's and torch's attributes
        self.left = LeftBehind(module, self._ignored)
        self._signature = inspect.signature(base.log)
        self.examples: dict[Any, Any] = {}  # containers of what a step returns, by step
        self.joins: dict[Any, Mapping[Path, int | None]] = {}  # by step: see `combine`
        self._log_options = frozenset(self._signature.parameters) - {"self", "name", "value"}
        self.changing_steps: set[Any] = set()  # by their keys: those that change their batch in place
        self.keeping_attributes: set[str] = set()  # that steps leave tensors in, which no later step sees
        self.in_place: dict[Any, set[str]] = defaultdict(set)  # by step: names of tensors that it changes in place
        self.runs_step = False  # whether the user's code of a step runs now, on a micro-batch
        self._kept: dict[int, _Record] = {}
        self._metrics: dict[str, AnyMetric] | None = None  # None between steps
        self._names: dict[int, str] = {}
        self._steps = 0
        self._known: dict[tuple[str, str], Any] = {}
        self._batch_sizes: dict[str, int] = {}
        self.per_row: dict[AttrPath, bool] = {}  # see `combine_changes`
        self._settled: dict[AttrPath, int] = {}  # of the kept micro-batches' batch, what a trial has shown
        self._running: tuple[_Record, AttributeWatch] | None = None
        self._watch: AttributeWatch | None = None  # of the micro-batch that runs

    @contextmanager
    def microbatch(
        self, index: int, size: int, keep: bool = True, weight: float | None = None, key: Any = None
    ) -> Iterator[None]:
        """Around a run of step ``key`` on micro-batch ``index`` of ``size`` rows; its losses have ``weight``, or that.

        What the step does to its module is undone, and kept for :meth:`results` if ``keep``. Otherwise values are not
        looked at. If the step raises, nothing is kept.
        """
        metrics = self._find_metrics()
        if weight is None:
            weight = 2.0 * size  # 1 would mean that losses are added up
        record = _Record(size, weight)
        # Within the watch small tensors in attributes are copies, so that a write in place can be undone.
        watch = AttributeWatch(self.module, self._ignored, self.in_place[key], self.left.is_learning)
        recorder, log = MetricRecorder(metrics, None, self._known), _ignore
        self._running = None
        if keep:
            recorder, log = MetricRecorder(metrics, record.add_call, self._known), self._recording_log(record)
            self._running = (record, watch)
        self._watch = watch
        try:
            patches = patched([*recorder.patches(), (self.module, "log", log)])
            with self.left.watched(index, size, weight), self._without_pipeline(), patches:
                yield
        finally:
            self._running = self._watch = None
            with without_torch_functions():
                record.close(without_remote(watch.undo()))
        if keep:
            self._kept[index] = record

    def finish(self, output: Any) -> Any:
        """Touch ``output`` and all tensors that are kept, and return it. To be called at the end of the step's run.

        Whoever traces the operations of a step learns by this that these values are needed where the step ends.
        """
        if self._running is not None:
            # Whatever the record refers to has to be on the rank where the step ends. Results of metrics need not be:
            # the metric is called there once more, with the arguments of all micro-batches.
            record, watch = self._running
            kept = leaves((record.touched, list(watch.growth().values()), watch.assigned(), output))
            found = [leaf for leaf in kept if isinstance(leaf, Tensor) and id(leaf) not in record.sources]
            touched = _touch(found)
            with without_torch_functions():
                watch.settle({id(leaf): after for leaf, after in zip(found, touched, strict=True)})
        return output

    def follows(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares memory with a copy that stands in for one in an attribute while the step runs."""
        return self._watch is not None and self._watch.stands_in(tensor)

    def clear(self) -> None:
        """Free the metrics' states, logged values and attributes that the micro-batches of a step left."""
        self._kept, self._metrics = {}, None
        self.left.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around other runs of the step: what was kept stays."""
        kept, metrics = self._kept, self._metrics
        with self.left.aside():
            self.clear()
            try:
                yield
            finally:
                self._kept, self._metrics = kept, metrics

    def values_logged(self, name: str) -> tuple[list[Any], list[int], list[float]]:
        """What was logged as ``name`` in the kept micro-batches, but for metrics; their rows and weights."""
        values: list[Any] = []
        sizes: list[int] = []
        weights: list[float] = []
        for record in self._kept.values():
            for event in record.events.values():
                if not isinstance(event, _Logged) or event.name != name:
                    continue
                is_of_a_metric = event.metric is not None or event.source is not None
                if not is_of_a_metric:
                    values.append(event.value)
                    sizes.append(record.size)
                    weights.append(record.weight)
        return values, sizes, weights

    def observed(self, outputs: Sequence[Any], key: Any) -> Observed:
        """:meth:`results` of the step ``key``, with copies of the states of metrics."""
        results = self.results(outputs, key=key)
        metrics = self._find_metrics()
        states = {name: getattr(metrics[name], "metric_state", None) for name in results.metrics if name in metrics}
        self.clear()
        return Observed(results, copied(states))

    def results(
        self, outputs: Sequence[Any], plain: Callable[[Any], Any] | None = None, key: Any = None
    ) -> StepResults:
        """Combine the kept micro-batches, and update metrics. On the rank where the step ends; others :meth:`clear`.

        Args:
            outputs: what the step returned for each micro-batch, in the order of their indices.
            plain: applied to all that was kept, and to ``outputs``, first.
            key: of the step, for what is known of it.

        Raises:
            UncombinableError: there is no rule for what the step returned, or for the arguments of a metric. No metric
                has been updated then.
        """
        records = [self._kept[index] for index in sorted(self._kept)]
        if plain is not None:
            for record in records:
                record.apply(plain)
            outputs = plain(list(outputs))
        sizes = [record.size for record in records]
        assert len(outputs) == len(records), f"{len(outputs)} outputs of {len(records)} micro-batches"
        with self._without_pipeline(), torch.no_grad():
            if len(records) > 1:  # raises before anything is changed
                combine([detached(output) for output in outputs], sizes, self.joins.get(key))
                self._require_no_doubts(records, key)
            # From here on metrics are updated: each call is made once, with the rows of all micro-batches.
            logs, metrics, returned = self._combine_events(records)
            marks = _Marks(returned)
            weights = [record.weight for record in records]
            # Attributes. What a trial has shown of this batch's integers goes before what rules say.
            changes = [marks.put_on_changes(record) for record in records]
            appended, values = marks.take_off(combine_changes(changes, sizes, weights, self.per_row))
            attributes = {where[0]: value for where, value in (values | self._settled).items()}
            # What the step returned: tensors of rows are put together, losses are weighted means.
            marked = [detached(marks.put_on(o, record)) for o, record in zip(outputs, records, strict=True)]
            combined = combine(marked, sizes, self.joins.get(key))
            output = marks.take_off(_with_losses(combined, marked, weights))
        self._kept, self._metrics, self._settled = {}, None, {}
        return StepResults(logs, metrics, appended, attributes, output)

    def _require_no_doubts(self, records: Sequence[_Record], key: Any) -> None:
        """Raise ``UncombinableError`` if an evaluation step moves an integer that may count rows or calls.

        Such a step is then run again on the whole batch, which a training step cannot be: see ``require_known_counts``.
        """
        if key is None or key[0] == "training_step":
            return
        doubtful = doubtful_counts([record.changes for record in records], self.per_row)
        if doubtful:
            raise UncombinableError(
                f"self.{doubtful[0][0]} goes on by the same number for each micro-batch, so it may count rows or calls"
            )

    def require_known_counts(self, key: Any) -> None:
        """Raise ``UncombinableError`` if a trial has to show first what an integer counts that training has moved."""
        unknown = self._unknown_counts()
        if unknown and key[0] == "training_step":
            raise UncombinableError(f"{UNKNOWN}self.{unknown[0].where[0]}")

    def learn_counts(self, whole: Mapping[AttrPath, Any], parts: Sequence[Mapping[AttrPath, Any]]) -> str | None:
        """Learn it of runs of the batch at once and of its micro-batches: what they set attributes to.

        Returns:
            What is wrong with one that counts neither rows nor calls.
        """
        return settle_counts(self._unknown_counts(), whole, parts, self.per_row, self._settled)

    def _unknown_counts(self) -> list[Moved]:
        changes = [self._kept[index].changes for index in sorted(self._kept)]
        return unsettled_counts(changes, self.per_row, self._settled)

    # ---- micro-batches ----

    def _find_metrics(self) -> dict[str, AnyMetric]:
        steps = 0
        if self.pipeline_metrics is not None:
            steps = self.pipeline_metrics.steps
        if self._metrics is None or steps != self._steps:  # the first micro-batch of a step
            self._metrics, self._steps = named_metrics(self.module), steps
            self._names = {id(metric): name for name, metric in self._metrics.items()}
            if self.pipeline_metrics is not None:
                self.pipeline_metrics.refresh(self._metrics)
        return self._metrics

    def _without_pipeline(self) -> AbstractContextManager[None]:
        """Here metrics do not wait for the pipeline's other ranks, which do not call them now."""
        if self.pipeline_metrics is None:
            return nullcontext()
        return self.pipeline_metrics.local()

    def _recording_log(self, record: _Record) -> Callable[..., None]:
        """What ``module.log`` is replaced by: it keeps what it is called with.

        What Lightning would refuse goes to Lightning's own ``log``, which says what is wrong.
        """
        original = self.module.log

        def log(*args: Any, **kwargs: Any) -> None:
            options = self._options(args, kwargs)
            name, value = options.pop("name"), options.pop("value")
            metric = None
            if isinstance(value, Metric):
                metric = self._names.get(id(value), options.get("metric_attribute"))
            with without_torch_functions():
                if self._is_loggable(name, value, metric, options):
                    record.add_log(name, value, metric, options)
                    return
            original(*args, **kwargs)

        return log

    def _options(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What ``self.log`` was called with, by name."""
        if len(args) == 2 and kwargs.keys() <= self._log_options:  # as nearly always; binding is slow
            return {"name": args[0], "value": args[1], **kwargs}
        options = dict(self._signature.bind(self.module, *args, **kwargs).arguments)
        del options["self"]
        return options

    @staticmethod
    def _is_loggable(name: str, value: Any, metric: str | None, options: dict[str, Any]) -> bool:
        if options.get("sync_dist_group") is not None:
            raise ValueError(
                f"self.log({name!r}, ..., sync_dist_group=...): a pipeline calls `self.log` on all of its ranks and "
                "reduces over its replicas. Leave `sync_dist_group` out."
            )
        rule = reduction_name(options.get("reduce_fx", "mean"))
        options["reduce_fx"] = rule or "mean"
        if isinstance(value, Tensor):
            is_number = value.numel() == 1
        else:
            is_number = isinstance(value, numbers.Number)
        return rule is not None and (metric is not None or is_number)

    # ---- the batch ----

    def _combine_events(self, records: list[_Record]) -> tuple[list[Log], dict[str, tuple[int, Any]], _Returned]:
        """Make each call of a metric, and combine each call of ``self.log``, once for the batch.

        Returns:
            Calls of ``self.log``; update counts and forward caches of metrics; results of metrics by call.
        """
        logs, returned, called = [], {}, set()
        merged = self._merge_calls(records)  # of all calls first: it raises before any metric is updated
        for key in _merged_order([list(record.events) for record in records]):
            found = [(record.events[key], record.size) for record in records if key in record.events]
            first = found[0][0]
            if isinstance(first, MetricCall):
                args, kwargs = merged[key]
                metric = self._find_metrics()[first.metric]
                function: Callable[..., Any] = metric
                if first.method != "forward":
                    function = getattr(metric, first.method)
                returned[key] = leaves(detached(function(*args, **kwargs)))
                called.add(first.metric)
            else:
                logged = [event for event, _ in found if isinstance(event, _Logged)]
                logs.append(self._combine_logs(logged, [size for _, size in found], returned))
        return logs, self._progress(called), returned

    def _merge_calls(self, records: list[_Record]) -> dict[_Key, tuple[Any, Any]]:
        """Arguments of all calls of metrics for the batch."""
        found: dict[_Key, tuple[list[MetricCall], list[int]]] = {}
        for record in records:
            for key, event in record.events.items():
                if isinstance(event, MetricCall):
                    calls, sizes = found.setdefault(key, ([], []))
                    calls.append(event)
                    sizes.append(record.size)
        return {
            key: merged_arguments(calls, sizes, self.rules.get(calls[0].metric))
            for key, (calls, sizes) in found.items()
        }

    def _combine_logs(self, logs: list[_Logged], sizes: list[int], returned: _Returned) -> Log:
        """One call of ``self.log`` for the batch, of those of micro-batches; ``returned``: what metrics gave for it."""
        first = logs[0]
        options = dict(first.options)
        weights: Sequence[float] = sizes
        if options.get("batch_size") is not None:
            given = [int(log.options["batch_size"]) for log in logs]
            known = self._batch_sizes.get(first.name)
            options["batch_size"], known = whole_batch_size(given, sizes, known)
            if known is not None:
                self._batch_sizes[first.name] = known
            if len(set(given)) > 1:  # what the value is a mean over
                weights = given
        if first.metric is not None:
            metric = self._find_metrics()[first.metric]
            assert isinstance(metric, Metric)
            return Log(first.name, None, first.metric, detached(forward_cache(metric)), options)
        if first.source is not None and all(log.source == first.source for log in logs):
            key, leaf = first.source
            return Log(first.name, returned[key][leaf], None, None, options, is_whole=True)
        # A rule that the user gave or a trial has found goes before `reduce_fx`; a mean that is called a loss is
        # weighted as the loss is, which need not be by rows.
        rule = self.rules.get(first.name)
        values = [log.value for log in logs]
        if rule == "loss" or (rule is None and is_loss(first.name) and options["reduce_fx"] == "mean"):
            value = reduce_losses(values, [log.weight for log in logs])
        elif rule == "exp":
            value = reduce_exponentials(values, [log.weight for log in logs])
        else:
            value = reduce_values(rule or options["reduce_fx"], values, weights)
        return Log(first.name, value, None, None, options)

    def _progress(self, called: set[str]) -> dict[str, tuple[int, Any]]:
        """Update counts and forward caches of all metrics that share a collection or wrapper with a called one."""
        metrics = self._find_metrics()
        found = owners(metrics)
        progress = {}
        for owner in dict.fromkeys(found[name] for name in sorted(called)):
            for name, metric in members(metrics[owner]).items():
                path = owner
                if name:
                    path = f"{owner}.{name}"
                progress[path] = (metric.update_count, detached(forward_cache(metric)))
        return progress


class _Marks:
    """Stand for what metrics returned while micro-batches are combined: the batch has it already.

    A step that returns ``{"accuracy": self.accuracy(p, y)}`` has another tensor there for each micro-batch, and neither
    their mean nor their concatenation is the batch's. So the same mark replaces all of them: equal leaves combine to
    themselves. Afterwards the mark is replaced by what the metric returned for the batch.
    """

    def __init__(self, returned: _Returned) -> None:
        self.marks = {(key, leaf): _Mark(value) for key, found in returned.items() for leaf, value in enumerate(found)}

    def put_on(self, structure: Any, record: _Record) -> Any:
        """``structure`` with marks for what metrics returned in this micro-batch."""
        if not record.sources:
            return structure

        def mark(leaf: Any) -> Any:
            source = record.sources.get(id(leaf))
            if source is None:
                return leaf
            return self.marks[source]

        return map_leaves(mark, structure)

    def put_on_changes(self, record: _Record) -> Changes:
        """The changes of attributes in this micro-batch, with marks in the same way."""
        changes = record.changes
        appended = {where: detached(self.put_on(tail, record)) for where, tail in changes.appended.items()}
        values = {}
        for where, (before, after) in changes.values.items():
            values[where] = (before, detached(self.put_on(after, record)))
        return Changes(appended, values, changes.in_place)

    @staticmethod
    def take_off(structure: Any) -> Any:
        """``structure`` with what metrics returned for the batch where marks were."""

        def unmark(leaf: Any) -> Any:
            if isinstance(leaf, _Mark):
                return leaf.value
            return leaf

        return map_leaves(unmark, structure)


class _Mark:
    """Compared by identity, so that it is the same leaf in the outputs of all micro-batches."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _merged_order(sequences: list[list[_Key]]) -> list[_Key]:
    """All keys, in an order that keeps to that of each sequence where they agree.

    A call that only some micro-batches make comes behind the one that it followed there: [a, c] and [a, b] give
    [a, b, c].
    """
    merged: list[_Key] = []
    for sequence in sequences:
        position = 0
        for key in sequence:
            if key in merged:
                position = merged.index(key) + 1
            else:
                merged.insert(position, key)
                position += 1
    return merged


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _touch(tensors: list[Tensor]) -> list[Tensor]:
    """Detach ``tensors`` in one operation, so that no stage can begin between two of them."""
    if has_torch_function(tensors):  # whoever follows a step sees this function
        touched: list[Tensor] = handle_torch_function(_touch, tensors, tensors)
        return touched
    return [tensor.detach() for tensor in tensors]


def _with_losses(output: Any, outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """``output`` with its losses weighted: a scalar that the step returned, or members of a dict that are called so."""
    if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point():
        return reduce_losses(outputs, weights).to(output.dtype)
    if isinstance(output, dict):
        for key, value in output.items():
            if is_loss(key):
                output[key] = _with_losses(value, [other[key] for other in outputs], weights)
    return output
