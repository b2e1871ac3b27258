"""Keeps a step that is repeated for micro-batches from Lightning, and combines what it did.

Lightning expects one ``training_step`` for a batch; the pipeline runs it once for each micro-batch. While it runs,
calls of ``self.log`` and of metrics go to a record of that micro-batch, and attributes that it sets are set back::

    micro-batch 0:  log("loss", 2.0)  accuracy(p0, y0)  self.seen = 8   -> Record 0
    micro-batch 1:  log("loss", 4.0)  accuracy(p1, y1)  self.seen = 8   -> Record 1
    the batch:      log("loss", 3.0)  accuracy(p, y)    self.seen = 16  <- StepCapture.results

What the step logged, updated and set is captured here; ``pipeline/capture/`` is about which operations it consists of.
"""

from __future__ import annotations

import inspect
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torchmetrics import Metric

from lightning_smddp._compat.torch import without_torch_functions
from lightning_smddp.bridge.combined_changes import combine_changes
from lightning_smddp.bridge.combined_events import EventCombiner
from lightning_smddp.bridge.logged_values import Rule, is_loss, reduce_losses, reduction_name
from lightning_smddp.bridge.metrics import AnyMetric, MetricRecorder, PipelineMetrics, named_metrics, patched
from lightning_smddp.bridge.step_attributes import AttributeWatch, AttrPath, Changes, detached
from lightning_smddp.bridge.step_records import Marks, Record
from lightning_smddp.bridge.step_results import StepResults
from lightning_smddp.pipeline.partition.outputs import merge_outputs
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.wire.pytree import leaves, tensors


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
        self,
        module: Any,
        rules: Mapping[str, Rule] | None = None,
        metrics: PipelineMetrics | None = None,
    ) -> None:
        self.module = module
        self.rules = dict(rules or {})
        self.pipeline_metrics = metrics
        base = _lightning_module(type(module))
        self._ignored = frozenset(vars(base()))  # Lightning's and torch's attributes
        self._events = EventCombiner(self.rules)
        self._signature = inspect.signature(base.log)
        self.examples: dict[Any, Any] = {}  # containers of what a step returns, by step
        self._log_options = frozenset(self._signature.parameters) - {"self", "name", "value"}
        self.changing_steps: set[Any] = set()  # by their keys: those that change their batch in place
        self.keeping_attributes: set[str] = set()  # that steps leave tensors in, which no later step sees
        self.in_place: dict[Any, set[str]] = defaultdict(set)  # by step: names of tensors that it changes in place
        self.runs_step = False  # whether the user's code of a step runs now, on a micro-batch
        self._kept: dict[int, Record] = {}
        self._metrics: dict[str, AnyMetric] | None = None  # None between steps
        self._names: dict[int, str] = {}
        self._steps = 0
        self._known: dict[tuple[str, str], Any] = {}  # see `MetricRecorder`
        self.per_row: dict[AttrPath, bool] = {}  # lists that gain an item for each row
        self._running: tuple[Record, AttributeWatch] | None = None
        self._watch: AttributeWatch | None = None  # of the micro-batch that runs

    @contextmanager
    def microbatch(
        self,
        index: int,
        size: int,
        keep: bool = True,
        weight: float | None = None,
        key: Any = None,
    ) -> Iterator[None]:
        """Around a run of step ``key`` on micro-batch ``index`` of ``size`` rows; its losses have ``weight``, or that.

        What the step does to its module is undone, and kept for :meth:`results` if ``keep``. Otherwise values are not
        looked at. If the step raises, nothing is kept.
        """
        metrics = self._find_metrics()
        if weight is None:
            weight = 2.0 * size  # 1 would mean that losses are added up
        record = Record(size, weight)
        # Within the watch small tensors in attributes are copies, so that a write in place can be undone.
        watch = AttributeWatch(self.module, self._ignored, self.in_place[key], False)
        if keep:
            recorder = MetricRecorder(metrics, record.add_call, self._known)
            log = self._recording_log(record)
            self._running = (record, watch)
        else:
            recorder = MetricRecorder(metrics, None, self._known)
            log = _ignore
            self._running = None
        self._watch = watch
        try:
            patches = patched([*recorder.patches(), (self.module, "log", log)])
            with self._without_pipeline(), patches:
                yield
        finally:
            self._running = self._watch = None
            with without_torch_functions():
                record.close(_without_remote(watch.undo()))
        if keep:
            self._kept[index] = record

    def finish(self, output: Any) -> Any:
        """Touch ``output`` and all tensors that are kept, and return it. To be called at the end of the step's run.

        Whoever traces the operations of a step learns by this that these values are needed where the step ends.
        """
        if self._running is None:
            return output
        # Whatever the record refers to has to be on the rank where the step ends. Results of metrics need not be: the
        # metric is called there once more, with the arguments of all micro-batches.
        record, watch = self._running
        appended = list(watch.growth().values())
        kept = leaves((record.touched, appended, watch.assigned(), output))
        found = [leaf for leaf in kept if isinstance(leaf, Tensor) and id(leaf) not in record.sources]
        touched = _touch(found)
        with without_torch_functions():
            watch.settle({id(leaf): after for leaf, after in zip(found, touched, strict=True)})
        return output

    def clear(self) -> None:
        """Free the metrics' states, logged values and attributes that the micro-batches of a step left."""
        self._kept = {}
        self._metrics = None

    def results(
        self,
        outputs: Sequence[Any],
        plain: Callable[[Any], Any] | None = None,
        key: Any = None,
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
        records = self._records()
        if plain is not None:
            for record in records:
                record.apply(plain)
            outputs = plain(list(outputs))
        sizes = [record.size for record in records]
        weights = [record.weight for record in records]
        assert len(outputs) == len(records), f"{len(outputs)} outputs of {len(records)} micro-batches"
        with self._without_pipeline(), torch.no_grad():
            if len(records) > 1:  # raises before anything is changed
                merge_outputs([detached(output) for output in outputs], sizes, weights)
            # From here on metrics are updated: each call is made once, with the rows of all micro-batches.
            events = self._events.combine(records, self._find_metrics())
            marks = Marks(events.returned)
            # Attributes.
            changes = [marks.put_on_changes(record) for record in records]
            combined_changes = combine_changes(changes, sizes, weights, self.per_row)
            appended, values = marks.take_off(combined_changes)
            attributes = {where[0]: value for where, value in values.items()}
            # What the step returned: tensors of rows are put together, losses are weighted means.
            marked = [marks.put_on(output, record) for output, record in zip(outputs, records, strict=True)]
            combined = merge_outputs(marked, sizes, weights)
            output = marks.take_off(_with_losses(combined, marked, weights))
        self._kept = {}
        self._metrics = None
        return StepResults(events.logs, events.progress, appended, attributes, output)

    def _records(self) -> list[Record]:
        """Of the kept micro-batches, in the order of their indices, which may not be that in which they ran."""
        return [self._kept[index] for index in sorted(self._kept)]

    # ---- micro-batches ----

    def _find_metrics(self) -> dict[str, AnyMetric]:
        """The module's metrics by name, looked for once a step: at its first micro-batch."""
        steps = 0
        if self.pipeline_metrics is not None:
            steps = self.pipeline_metrics.steps
        if self._metrics is not None and steps == self._steps:
            return self._metrics
        self._metrics = named_metrics(self.module)
        self._steps = steps
        self._names = {id(metric): name for name, metric in self._metrics.items()}
        if self.pipeline_metrics is not None:
            self.pipeline_metrics.refresh(self._metrics)
        return self._metrics

    def _without_pipeline(self) -> AbstractContextManager[None]:
        """Here metrics do not wait for the pipeline's other ranks, which do not call them now."""
        if self.pipeline_metrics is None:
            return nullcontext()
        return self.pipeline_metrics.local()

    def _recording_log(self, record: Record) -> Callable[..., None]:
        """What ``module.log`` is replaced by: it keeps what it is called with.

        What Lightning would refuse goes to Lightning's own ``log``, which says what is wrong.
        """
        original = self.module.log

        def log(*args: Any, **kwargs: Any) -> None:
            options = self._options(args, kwargs)
            name = options.pop("name")
            value = options.pop("value")
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
        if rule is None:
            return False
        if metric is not None:
            return True
        if isinstance(value, Tensor):
            return value.numel() == 1
        return isinstance(value, numbers.Number)


def _lightning_module(cls: type) -> Any:
    """The ``LightningModule`` that ``cls`` is a class of: of the package ``lightning`` or of ``pytorch_lightning``."""
    for base in cls.__mro__:
        if base.__name__ == "LightningModule":
            return base
    raise TypeError(f"{cls.__name__} is no LightningModule")


def _without_remote(changes: Changes) -> Changes:
    """``changes`` but for values with tensors of other stages."""
    values = {}
    for where, (before, after) in changes.values.items():
        if not any(type(tensor) is RemoteTensor for tensor in tensors(after)):
            values[where] = (before, after)
    return replace(changes, values=values)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _touch(kept: list[Tensor]) -> list[Tensor]:
    """Detach what is ``kept`` in one operation, so that no stage can begin between two of them."""
    if has_torch_function(kept):  # whoever follows a step sees this function
        touched: list[Tensor] = handle_torch_function(_touch, kept, kept)
        return touched
    return [tensor.detach() for tensor in kept]


def _with_losses(output: Any, outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """``output`` with its losses weighted: a scalar that the step returned, or members of a dict that are called so."""
    if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point():
        return reduce_losses(outputs, weights).to(output.dtype)
    if isinstance(output, dict):
        for key, value in output.items():
            if is_loss(key):
                output[key] = _with_losses(value, [other[key] for other in outputs], weights)
    return output
