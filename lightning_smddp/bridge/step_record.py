"""What a step logs, sets and returns for micro-batches, put together for Lightning, which expects one step for a batch.

While a micro-batch runs where the step ends, calls of ``self.log`` are kept, metrics are called, and what is kept or
returned is touched, so that other stages send it there. On other stages the same calls do nothing::

    micro-batch 0:  log("loss", 2.0)  accuracy(p0, y0)  self.seen 0 -> 4    Record 0
    micro-batch 1:  log("loss", 4.0)  accuracy(p1, y1)  self.seen 4 -> 8    Record 1
    the batch:      log("loss", 3.0)                    self.seen = 8       StepRecorder.results, on all ranks

Means have the weights of the losses: what a value is a mean over, rows or labels, its loss is nearly always, too.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_smddp._compat.torch import forward_cache, set_forward_cache, without_torch_functions
from lightning_smddp.bridge.attribute_scopes import AttributeScopes
from lightning_smddp.bridge.attributes import Change, is_plain
from lightning_smddp.bridge.metrics import PipelineMetrics, Plain, touch
from lightning_smddp.communication.tensors import CPU, from_numbers
from lightning_smddp.patches import patched
from lightning_smddp.pipeline.capture.tracer import open_modules
from lightning_smddp.pipeline.partition.microbatches import merge_outputs
from lightning_smddp.pipeline.runtime.remote_tensor import RemoteTensor
from lightning_smddp.pytree import detached, tensors


@dataclass
class Log:
    """A call of ``self.log``.

    Attributes:
        name: that was given.
        value: as it was then; of a metric what it showed last.
        metric: the metric's name in the module; None for other values.
        options: the call's others.
        given: what was logged, itself, until the step ends.
        is_loss: whether that is the loss.
    """

    name: str
    value: Any
    metric: str | None
    options: dict[str, Any]
    given: Any = None
    is_loss: bool = False


@dataclass
class _Record:
    """What a step did on one micro-batch, where it ends.

    Attributes:
        size: its rows.
        weight: of its loss.
        logs: by name, and which call with it.
        touched: what else is needed at its end.
    """

    size: int
    weight: float
    logs: dict[tuple[str, int], Log] = field(default_factory=dict)
    touched: list[Any] = field(default_factory=list)

    def add(self, log: Log) -> None:
        """Keep what one call of ``self.log`` was given; a name that is logged again is another entry."""
        number = [name for name, _ in self.logs].count(log.name)
        self.logs[log.name, number] = log

    def close(self, touched: Mapping[int, Tensor], output: Any) -> None:
        """The step has returned ``output``. Let go of the graph; ``touched``: by a tensor's id, what it is here."""
        loss = touched.get(id(_loss_in(output)))
        for log in self.logs.values():
            value = touched.get(id(log.given))
            if value is None:
                continue  # a number, or a metric
            if isinstance(log.given, RemoteTensor):
                log.value = value.clone()
            log.is_loss = loss is not None and value.data_ptr() == loss.data_ptr()
            log.given = None
        self.touched.clear()


@dataclass
class StepResults:
    """What a batch shows: plain data and tensors.

    Attributes:
        logs: calls of ``self.log``, in order.
        output: what the step returns.
        changes: of attributes.
        metrics: names of those that it called.
        should_stop: whether the Trainer is told to stop.
        share: the weight of those micro-batches for which a training step returned something, where not all did.
    """

    logs: list[Log]
    output: Any
    changes: list[Change]
    metrics: list[str]
    should_stop: bool
    share: float = 1.0


class StepRecorder:
    """Keeps what a LightningModule's steps do on micro-batches, until that is shown for the batch.

    Args:
        module: the LightningModule.
        metrics: those of this rank's pipeline; None where there is one process.

    Attributes:
        scopes: the module's attributes during a batch.
        changing_steps: keys of those that write into their batch.
    """

    def __init__(self, module: Any, metrics: PipelineMetrics | None = None) -> None:
        # Of the package `lightning` or of `pytorch_lightning`.
        base: Any = next(base for base in type(module).__mro__ if base.__name__ == "LightningModule")
        self.module = module
        # `log` is one of its instance while a step or a hook runs, and whoever set it puts back what was there.
        self.scopes = AttributeScopes(module, frozenset({*vars(base()), "log"}))
        self.metrics = metrics or PipelineMetrics(module)
        self.changing_steps: set[Any] = set()
        self._options = list(inspect.signature(base.log).parameters)[3:]  # behind self, name and value
        self._records: dict[int, _Record] = {}
        self._running: _Record | None = None

    # ---- micro-batches ----

    @contextmanager
    def microbatch(
        self,
        stage: int | None,
        index: int,
        size: int,
        weight: float,
        keep: bool,
        plain: Plain | None = None,
    ) -> Iterator[None]:
        """Around a run of ``stage``, or one for nothing (None), on micro-batch ``index`` of ``size`` rows.

        What it does is kept for :meth:`results` if ``keep``, which is so where the step ends. In lockstep, where all
        ranks run all of the step, ``plain`` makes tensors those of this rank.
        """
        record = _Record(size, weight)
        log = self._recording_log(record, self.module.log) if keep else self._ignored_log
        patches = [(vars(self.module), "log", log), (vars(self), "_running", record if keep else None)]
        patches += self.metrics.patches(record.touched if keep else None, plain)
        with self.scopes.within(stage, index), patched(patches):
            yield
        if keep:
            self._records[index] = record

    def finish(self, output: Any) -> Any:
        """Touch ``output`` and all tensors that are kept, and return it. To be called at the end of the step's run.

        Whoever traces the operations of a step learns by this that these values are needed where the step ends.
        """
        record = self._running
        if record is None:
            return output
        effects = self.scopes.side_effects()
        found = tensors(([log.given for log in record.logs.values()], record.touched, effects, output))
        touched = {id(tensor): touch(tensor) for tensor in found}
        with without_torch_functions():
            self.scopes.settle(effects, touched)
            record.close(touched, output)
        return output

    def drop(self) -> None:
        """Throw away what micro-batches have done."""
        self._records.clear()
        self.scopes.drop()
        self.metrics.drop()

    # ---- the batch ----

    def results(
        self,
        outputs: Sequence[Any],
        trains: bool = False,
        plain: Plain | None = None,
    ) -> StepResults:
        """What the micro-batches make up. On the rank where the step ends.

        Args:
            outputs: what the step returned for each micro-batch, in order.
            trains: whether it is a training step. For which it returns None, those micro-batches do not count.
            plain: see :meth:`microbatch`.

        Raises:
            UncombinableError: there is no rule for what the step returned.
        """
        indices = sorted(self._records)  # they may have run in another order
        runs = [(self._records[index], output) for index, output in zip(indices, outputs, strict=True)]
        counting = [run for run in runs if run[1] is not None or not trains]
        adds = _adds_losses([record for record, _ in runs])
        share = 1.0
        if len(counting) < len(runs) and not adds:
            share = sum(record.weight for record, _ in counting)
        records, outputs = zip(*(counting or runs), strict=True)
        changes = detached([change for change in self.scopes.changes() if is_plain(change)])
        if plain is not None:
            records, outputs, changes = plain((records, outputs, changes))
        with torch.no_grad():
            logs = _combined_logs(records, adds)
            parts = [detached(output) for output in outputs]
            output = merge_outputs(parts, [record.size for record in records], _weights(records, adds))
            if trains and output is not None and adds:
                loss = sum(map(_loss_in, parts))
                output = {**output, "loss": loss} if isinstance(output, dict) else loss
        stops = bool(getattr(vars(self.module).get("_trainer"), "should_stop", False))
        return StepResults(logs, output, changes, self.metrics.called, stops, share)

    def apply(self, results: StepResults) -> Any:
        """Show the batch to Lightning, on every rank in the strategy's step method; returns what the step returns."""
        self._records.clear()
        module = self.module
        self.scopes.end(results.changes)
        for log in results.logs:
            value = log.value
            if log.metric is not None:
                # What Lightning shows of a metric for a step is its forward cache, which is of the last micro-batch.
                value = module.get_submodule(log.metric)
                set_forward_cache(value, log.value)
            module.log(log.name, value, **log.options)
        self.metrics.end(results.metrics)
        if results.should_stop:
            module.trainer.should_stop = True
        return results.output

    # ---- logging ----

    def _recording_log(self, record: _Record, original: Callable[..., None]) -> Callable[..., None]:
        """Keeps what it is called with; what Lightning would refuse goes to ``original``, which says what is wrong."""

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            open_modules(f"it calls `self.log({name!r}, ...)`")
            options = dict(zip(self._options, args, strict=False), **kwargs)
            if options.get("sync_dist_group") is not None:  # it cannot be sent to the other stages
                raise ValueError(f"self.log({name!r}, sync_dist_group=...) in a pipeline: leave `sync_dist_group` out.")
            reduction = reduction_name(options.get("reduce_fx", "mean"))
            with without_torch_functions():
                is_number = isinstance(value, numbers.Number) or (isinstance(value, Tensor) and value.numel() == 1)
                entry = None
                if isinstance(value, Metric):
                    metric = (self.metrics.names or {}).get(id(value)) or options.get("metric_attribute")
                    entry = Log(name, detached(forward_cache(value)), metric, options)
                elif is_number:
                    entry = Log(name, _now(value), None, options, value)
            if reduction is None or entry is None:
                original(name, value, *args, **kwargs)
                return
            options["reduce_fx"] = reduction
            record.add(entry)

        return log

    def _ignored_log(self, *args: Any, **kwargs: Any) -> None:
        """On stages where the step does not end."""


# ---- values of micro-batches -----------------------------------------------------------------------------------------


def reduction_name(reduce_fx: Any) -> str | None:
    """``mean``, ``sum``, ``max`` or ``min``, of a name or of a function so called; None for what Lightning refuses."""
    name = str(getattr(reduce_fx, "__name__", reduce_fx)).lower().replace("avg", "mean")
    return name if name in ("mean", "sum", "max", "min") else None


def reduce_logged(reduction: str, values: Sequence[Any], weights: Sequence[float]) -> Tensor:
    """One value out of those of micro-batches: numbers, or tensors with one element.

    Args:
        reduction: see :func:`reduction_name`.
        values: of each micro-batch that has one.
        weights: of these. A mean leaves out what weighs nothing; it is floating-point, also of integers.
    """
    device = next((value.device for value in values if isinstance(value, Tensor)), CPU)
    stacked = torch.stack([torch.as_tensor(value, device=device).squeeze() for value in values])
    if reduction != "mean":
        return getattr(stacked, reduction)()  # type: ignore[no-any-return]
    shares = from_numbers(weights, torch.float64, device)
    counted = torch.where(shares > 0, stacked * shares, 0.0)
    return (counted.sum() / sum(weights)).to(torch.promote_types(torch.float32, stacked.dtype))


def _combined_logs(records: Sequence[_Record], adds: bool) -> list[Log]:
    """Each call once, over the micro-batches that made it. ``adds``: see :func:`_adds_losses`."""
    combined = []
    for key in dict.fromkeys(key for record in records for key in record.logs):
        having = [record for record in records if key in record.logs]
        logs = [record.logs[key] for record in having]
        last = logs[-1]
        values, weights = [log.value for log in logs], _weights(having, adds)
        if last.options.get("batch_size") is not None:
            weights = [int(log.options["batch_size"]) for log in logs]
            last.options["batch_size"] = sum(weights)
        reduction = "mean" if last.metric is not None else last.options["reduce_fx"]  # of what the metric showed
        if adds and reduction == "mean" and all(log.is_loss for log in logs):
            reduction = "sum"
        if all(value is not None for value in values):  # a metric that was updated alone shows nothing
            last.value = reduce_logged(reduction, values, weights)
        combined.append(last)
    return combined


def _loss_in(output: Any) -> Any:
    return output.get("loss") if isinstance(output, dict) else output


def _adds_losses(records: Sequence[_Record]) -> bool:
    """Whether the batch's loss is the sum of the micro-batches', each weighing 1, and not their mean."""
    return len(records) > 1 and all(record.weight == 1 for record in records)


def _weights(records: Sequence[_Record], adds: bool) -> list[float]:
    """Of means: where losses are added, rows; where nothing weighs anything, the same for all."""
    weights = [float(record.size) if adds else record.weight for record in records]
    return weights if any(weights) else [1.0] * len(weights)


def _now(value: Any) -> Any:
    """What was logged, as it is now: it may change in place behind the call. Of another stage it comes at the end."""
    if isinstance(value, RemoteTensor):
        return None
    return value.detach().clone() if isinstance(value, Tensor) else value
