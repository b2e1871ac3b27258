"""torchmetrics objects under pipeline parallelism.

A step that is repeated for each micro-batch must update a metric once, with the whole batch. So calls of metrics in a
micro-batch are recorded (:class:`MetricRecorder`), and made once when all are known, with :func:`merged_arguments`,
on the rank that sees the end of the step. There, and only there, is a metric's state: see ``pipeline_metrics.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_smddp._compat.torch import keep_compute_groups, without_torch_functions
from lightning_smddp.pipeline.capture.pytree import map_leaves, tensors
from lightning_smddp.pipeline.partition.microbatches import UncombinableError, combine

AnyMetric: TypeAlias = "Metric | MetricCollection"
_METHODS = ("forward", "update", "compute", "reset")


def named_metrics(module: nn.Module) -> dict[str, AnyMetric]:
    """Metrics and collections among ``module``'s submodules, by their first names."""
    return {name: found for name, found in module.named_modules() if isinstance(found, (Metric, MetricCollection))}


@contextmanager
def patched(functions: Iterable[tuple[nn.Module, str, Callable[..., Any]]]) -> Iterator[None]:
    """Set functions as attributes of module instances, and put back what was there."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module, name, function in functions:
            undo.append((vars(module), name, vars(module).get(name)))
            vars(module)[name] = function
        yield
    finally:
        for attributes, name, before in reversed(undo):
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before


# ---- in a micro-batch ------------------------------------------------------------------------------------------------


@dataclass
class MetricCall:
    """A call that user code made."""

    metric: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class MetricRecorder:
    """Takes the calls of a module's metrics while they are patched.

    ``forward`` returns the value for the micro-batch, ``compute`` the value with the micro-batch in it; the metrics
    stay as they are.

    Args:
        metrics: from :func:`named_metrics`.
        record: is given each call; None: nothing is touched, and calls return zeros like the last results in ``known``.
        known: results by metric and method, kept by the caller from step to step.
    """

    def __init__(
        self,
        metrics: Mapping[str, AnyMetric],
        record: Callable[[MetricCall], None] | None,
        known: dict[tuple[str, str], Any],
    ) -> None:
        self.metrics, self.record, self.known = metrics, record, known
        self.calls: list[MetricCall] = []
        self.busy = False

    def patches(self) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
        """What to give to :func:`patched`."""
        for name, metric in self.metrics.items():
            for method in _METHODS:
                yield metric, method, self._wrap(name, metric, method)

    def _wrap(self, name: str, metric: AnyMetric, method: str) -> Callable[..., Any]:
        # `forward` as the class has it: whoever wrapped the instance's wants to see the user's modules only.
        original = type(metric).forward.__get__(metric) if method == "forward" else getattr(metric, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.busy:
                return original(*args, **kwargs)
            self.busy = True
            try:
                return self._call(name, metric, method, original, args, kwargs)
            finally:
                self.busy = False

        return call

    def _call(
        self,
        name: str,
        metric: AnyMetric,
        method: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with without_torch_functions():
            if self.record is None:
                return self._zeros(name, metric, method)
            result = self._value(name, metric, method, lambda: original(*args, **kwargs))
            may_be_loss = any(tensor.requires_grad for tensor in tensors(result))
        if may_be_loss:  # then it is a part of the step as others
            result = self._value(name, metric, method, lambda: original(*args, **kwargs))
        call = MetricCall(name, method, args, kwargs, result)
        with without_torch_functions():
            self.calls.append(call)
            self.record(call)
        return result

    def _value(self, name: str, metric: AnyMetric, method: str, function: Callable[[], Any]) -> Any:
        """What the call returns for the micro-batch; not a number if that has too few rows for this metric."""
        if method in ("update", "reset"):
            return None
        with isolated(metric, keep_state=method == "compute"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about few rows; about the batch's, it will warn again
            try:
                for earlier in self.calls if method == "compute" else ():
                    if earlier.metric == name:
                        getattr(metric, earlier.method)(*earlier.args, **earlier.kwargs)
                result = function()
            except (ValueError, RuntimeError, IndexError):  # which the whole batch will raise again, if it is at fault
                return map_leaves(lambda leaf: leaf + torch.nan, self._zeros(name, metric, method))
        self.known[name, method] = map_leaves(_zero, result)
        return result

    def _zeros(self, name: str, metric: AnyMetric, method: str) -> Any:
        if method in ("update", "reset"):
            return None
        if (name, method) in self.known:
            return map_leaves(_zero, self.known[name, method])
        if isinstance(metric, MetricCollection):
            return {name: torch.zeros((), device=m.device) for name, m in metric.items(copy_state=False)}
        return torch.zeros((), device=metric.device)


@contextmanager
def isolated(metric: AnyMetric, keep_state: bool) -> Iterator[None]:
    """Let ``metric`` be used without a trace, from its present state or from none, and without other processes."""
    inside = [m for m in metric.modules() if isinstance(m, (Metric, MetricCollection))]
    saved = [(vars(m), dict(vars(m))) for m in inside]
    try:
        for member in inside:
            if isinstance(member, MetricCollection):
                keep_compute_groups(member)
                continue
            member.distributed_available_fn = never
            for name, state in member.metric_state.items():
                setattr(member, name, state.clone() if isinstance(state, Tensor) else list(state))
        if not keep_state:
            metric.reset()
        yield
    finally:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)


def never() -> bool:
    """As ``distributed_available_fn`` it keeps a metric from other processes."""
    return False


def _zero(leaf: Any) -> Any:
    return torch.zeros_like(leaf, requires_grad=False) if isinstance(leaf, Tensor) else leaf


# ---- for the whole batch ---------------------------------------------------------------------------------------------


def merged_arguments(calls: Sequence[MetricCall], sizes: Sequence[int], rule: str | None) -> tuple[Any, Any]:
    """Arguments of the call that one process would have made, from those of micro-batches of ``sizes`` rows.

    Tensors with dimensions and lists are concatenated, whatever their lengths; numbers become their mean weighted by
    size, or the sum if they are integers that differ or are the sizes, or what ``rule`` says ("sum", "mean").

    Raises:
        UncombinableError: they cannot be put together.
    """
    try:
        args, kwargs = _merge([(call.args, call.kwargs) for call in calls], list(sizes), rule)
    except (ValueError, RuntimeError) as error:
        raise UncombinableError(
            f"The arguments that `self.{calls[0].metric}` was called with for the micro-batches cannot be put "
            f"together: {error}. Use num_microbatches=1."
        ) from error
    return args, kwargs


def _merge(values: list[Any], sizes: list[int], rule: str | None) -> Any:
    first = values[0]
    if all(value is first for value in values) and not (isinstance(first, int) and values == sizes):
        return first
    if all(isinstance(value, Tensor) and value.dim() for value in values):
        return torch.cat(values)
    if all(isinstance(value, list) for value in values):
        return [entry for value in values for entry in value]
    if all(isinstance(value, (tuple, Mapping)) and len(value) == len(first) for value in values):
        keys = list(first) if isinstance(first, Mapping) else range(len(first))
        merged = [_merge([value[key] for value in values], sizes, rule) for key in keys]
        return dict(zip(keys, merged, strict=True)) if isinstance(first, Mapping) else tuple(merged)
    is_count = all(type(value) is int for value in values) and values == sizes
    return sum(values) if is_count or (rule == "sum" and isinstance(first, (Tensor, float))) else combine(values, sizes)
