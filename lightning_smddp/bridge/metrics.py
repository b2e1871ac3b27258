"""torchmetrics objects under pipeline parallelism.

A step that is repeated for each micro-batch must update a metric once, with the whole batch. So calls of metrics in a
micro-batch are recorded (:class:`MetricRecorder`), and made once when all are known, with :func:`merged_arguments`,
on the rank that sees the end of the step. There, and only there, is a metric's state; :class:`PipelineMetrics` sends it
to the other ranks when ``compute`` is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_smddp._compat.torch import (
    computes_batch_value,
    keep_compute_groups,
    set_update_count,
    without_torch_functions,
)
from lightning_smddp.pipeline.capture.patches import set_within
from lightning_smddp.pipeline.partition.outputs import UncombinableError, merge_outputs
from lightning_smddp.wire.broadcast import broadcast_structure
from lightning_smddp.wire.pytree import map_leaves, tensors

AnyMetric: TypeAlias = "Metric | MetricCollection"
_METHODS = ("forward", "update", "compute", "reset")


def named_metrics(module: nn.Module) -> dict[str, AnyMetric]:
    """Metrics and collections among ``module``'s submodules, by their first names."""
    found: dict[str, AnyMetric] = {}
    for name, part in module.named_modules():
        if isinstance(part, (Metric, MetricCollection)):
            found[name] = part
    return found


@contextmanager
def patched(functions: Iterable[tuple[nn.Module, str, Callable[..., Any]]]) -> Iterator[None]:
    """Set functions as attributes of module instances, and put back what was there."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module, name, function in functions:
            attributes = vars(module)
            undo.append((attributes, name, attributes.get(name)))
            attributes[name] = function
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


@dataclass
class _Method:
    """A method of the metric that is called ``name``, as it is while nothing is patched."""

    name: str
    metric: AnyMetric
    method: str
    original: Callable[..., Any]

    @property
    def returns_nothing(self) -> bool:
        return self.method in ("update", "reset")


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
        self.metrics = metrics
        self.record = record
        self.known = known
        self.calls: list[MetricCall] = []
        self.busy = False

    def patches(self) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
        """Each method of each metric, and what is to be called in its place, for :func:`patched`."""
        for name, metric in self.metrics.items():
            for method in _METHODS:
                yield metric, method, self._wrap(name, metric, method)

    def _wrap(self, name: str, metric: AnyMetric, method: str) -> Callable[..., Any]:
        # `forward` as the class has it: whoever wrapped the instance's wants to see the user's modules only.
        if method == "forward":
            original = type(metric).forward.__get__(metric)
        else:
            original = getattr(metric, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            # What a metric calls of itself, or of the metrics in it, is a part of the user's call.
            if self.busy:
                return original(*args, **kwargs)
            self.busy = True
            try:
                return self._call(_Method(name, metric, method, original), args, kwargs)
            finally:
                self.busy = False

        return call

    def _call(self, called: _Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with without_torch_functions():
            if self.record is None:
                return self._zeros(called)
            result = self._value(called, args, kwargs)
            may_be_loss = any(tensor.requires_grad for tensor in tensors(result))
        if may_be_loss:  # then it is a part of the step as others
            result = self._value(called, args, kwargs)
        call = MetricCall(called.name, called.method, args, kwargs, result)
        with without_torch_functions():
            self.calls.append(call)
            self.record(call)
        return result

    def _value(self, called: _Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns for the micro-batch; not a number if that has too few rows for this metric."""
        if called.returns_nothing:
            return None
        is_compute = called.method == "compute"
        with isolated(called.metric, keep_state=is_compute), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about few rows; about the batch's, it will warn again
            try:
                if is_compute:
                    self._repeat_calls(called)
                result = called.original(*args, **kwargs)
            except (ValueError, RuntimeError, IndexError):  # which the whole batch will raise again, if it is at fault
                return map_leaves(lambda leaf: leaf + torch.nan, self._zeros(called))
        self.known[called.name, called.method] = map_leaves(_zero, result)
        return result

    def _repeat_calls(self, called: _Method) -> None:
        """Let the metric see this micro-batch's rows, which so far are only recorded: ``compute`` shows them, too."""
        for earlier in self.calls:
            if earlier.metric == called.name:
                getattr(called.metric, earlier.method)(*earlier.args, **earlier.kwargs)

    def _zeros(self, called: _Method) -> Any:
        if called.returns_nothing:
            return None
        key = (called.name, called.method)
        if key in self.known:
            return map_leaves(_zero, self.known[key])
        metric = called.metric
        if isinstance(metric, MetricCollection):
            return {name: torch.zeros((), device=m.device) for name, m in metric.items(copy_state=False)}
        return torch.zeros((), device=metric.device)


@contextmanager
def isolated(metric: AnyMetric, keep_state: bool) -> Iterator[None]:
    """Let ``metric`` be used without a trace, from its present state or from none, and without other processes."""
    inside = [m for m in metric.modules() if isinstance(m, (Metric, MetricCollection))]
    # All that a call may set is in attributes: states, counts of updates, values computed before.
    saved = [(vars(member), dict(vars(member))) for member in inside]
    try:
        for member in inside:
            if isinstance(member, MetricCollection):
                keep_compute_groups(member)
                continue
            member.distributed_available_fn = never
            # Metrics write into their states: a copy of each takes the writes.
            for name, state in member.metric_state.items():
                if isinstance(state, Tensor):
                    setattr(member, name, state.clone())
                else:
                    setattr(member, name, list(state))
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
    if isinstance(leaf, Tensor):
        return torch.zeros_like(leaf, requires_grad=False)
    return leaf


# ---- for the whole batch ---------------------------------------------------------------------------------------------


def merged_arguments(calls: Sequence[MetricCall], sizes: Sequence[int], rule: str | None) -> tuple[Any, Any]:
    """Arguments of the call that one process would have made, from those of micro-batches of ``sizes`` rows.

    Tensors with dimensions and lists are concatenated, whatever their lengths; numbers become their mean weighted by
    size, or the sum if they are integers that differ or are the sizes, or what ``rule`` says ("sum", "mean").

    Raises:
        UncombinableError: they cannot be put together.
    """
    arguments = [(call.args, call.kwargs) for call in calls]
    try:
        args, kwargs = _merge(arguments, list(sizes), rule)
    except (ValueError, RuntimeError) as error:
        raise UncombinableError(
            f"The arguments that `self.{calls[0].metric}` was called with for the micro-batches cannot be put "
            f"together: {error}. Use num_microbatches=1."
        ) from error
    return args, kwargs


def _merge(values: list[Any], sizes: list[int], rule: str | None) -> Any:
    # The same object for all micro-batches is an option of the call. Tensors and lists have the rows, and go one behind
    # the other; containers are merged member by member; numbers as in what a step returns, unless they count.
    first = values[0]
    if all(value is first for value in values):
        are_sizes = isinstance(first, int) and values == sizes  # of equal micro-batches: they add up
        if not are_sizes:
            return first
    if all(isinstance(value, Tensor) and value.dim() for value in values):
        return torch.cat(values)
    if all(isinstance(value, list) for value in values):
        return list(chain.from_iterable(values))
    if all(isinstance(value, (tuple, Mapping)) and len(value) == len(first) for value in values):
        if isinstance(first, Mapping):
            merged = {}
            for key in first:
                merged[key] = _merge([value[key] for value in values], sizes, rule)
            return merged
        return tuple(_merge(list(at_once), sizes, rule) for at_once in zip(*values, strict=True))
    is_count = all(type(value) is int for value in values) and values == sizes
    if is_count or (rule == "sum" and isinstance(first, (Tensor, float))):
        return sum(values)
    return merge_outputs(values, sizes, sizes)


_ATTRIBUTES = ("compute", "dist_sync_fn", "distributed_available_fn")


def members(metric: nn.Module) -> dict[str, Metric]:
    """``metric`` and the metrics in it, by name within it."""
    found = {}
    for name, part in metric.named_modules():
        if isinstance(part, Metric):
            found[name] = part
    return found


def owners(metrics: Iterable[str]) -> dict[str, str]:
    """For each metric the outermost metric or collection that it is part of."""
    found: dict[str, str] = {}
    for name in sorted(metrics, key=len):  # what a metric is part of has a shorter name, and comes before it
        parts = name.split(".")
        found[name] = name
        for length in range(1, len(parts)):
            prefix = ".".join(parts[:length])
            if prefix in found:
                found[name] = prefix
                break
    return found


@dataclass
class _Among:
    """torchmetrics' ``dist_sync_fn``: exchange among ``group`` where the metric names no group of its own."""

    group: dist.ProcessGroup | None

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        if group is None:
            group = self.group
        return gather_all_tensors(tensor, group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Among:
        return self  # process groups cannot be copied

    def __reduce__(self) -> Any:
        return _Among, (None,)  # nor sent to another process


@dataclass(frozen=True)
class _Patched:
    """A metric, what its attributes were, and what is in place of its ``compute``."""

    metric: Metric
    before: dict[str, Any]
    compute: Callable[..., Any]


@dataclass
class PipelineMetrics:
    """Makes ``compute`` of a module's metrics right on all ranks of a pipeline.

    The rank where the step ends has the state. When ``compute`` is called after steps, which has to happen on all
    ranks of the pipeline alike, its state is broadcast first: all metrics of a collection at once.

    Args:
        module: whose metrics.
        group: the ranks of the pipeline.
        src: the rank in ``group`` where the step ends.
        device: where collectives take their tensors from.
        replicas: the ranks that hold the same stage in other pipelines; None if there is one pipeline only.
    """

    module: nn.Module
    group: dist.ProcessGroup
    src: int
    device: torch.device
    replicas: dist.ProcessGroup | None = None
    steps: int = field(default=0, init=False)  # that were noted
    _changed: set[str] = field(default_factory=set, init=False)
    _owners: dict[str, str] = field(default_factory=dict, init=False)
    _metrics: dict[str, AnyMetric] = field(default_factory=dict, init=False)
    _patched: dict[int, _Patched] = field(default_factory=dict, init=False)  # by id
    _local: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Take over the metrics that the module has now; later ones are found by :meth:`refresh`."""
        self.refresh(named_metrics(self.module))

    def refresh(self, metrics: dict[str, AnyMetric]) -> None:
        """Patch metrics that are new, as those that a ``MetricTracker`` made are.

        A trial of the step puts back the attributes of all modules: a metric that was patched in it is patched again.
        """
        if metrics.keys() != self._metrics.keys():
            self._owners = owners(metrics)
        self._metrics = metrics
        for name, metric in metrics.items():
            if isinstance(metric, Metric) and not self._is_patched(metric):
                self._patch(name, metric)

    def _is_patched(self, metric: Metric) -> bool:
        known = self._patched.get(id(metric))
        return known is not None and vars(metric)["compute"] is known.compute

    def _patch(self, name: str, metric: Metric) -> None:
        if isinstance(metric.dist_sync_fn, _Among):  # a copy of a patched metric
            metric.dist_sync_fn = None
        if metric.distributed_available_fn is never:
            metric.distributed_available_fn = jit_distributed_available
        before = {key: vars(metric)[key] for key in _ATTRIBUTES}
        # `compute` is called on all ranks alike, and only the rank where the step ends has the state: so that is sent
        # first. What `forward` returns is for one batch alone, and needs no state of another rank.
        compute = metric.compute

        def shared_compute(*args: Any, **kwargs: Any) -> Any:
            if not self._local and not computes_batch_value(metric):
                self.share([self._owners.get(name, name)])
            return compute(*args, **kwargs)

        vars(metric)["compute"] = shared_compute
        self._patched[id(metric)] = _Patched(metric, before, shared_compute)
        # By itself torchmetrics would exchange states among all ranks of the world: that of a pipeline, which all its
        # ranks then have, would count once for each of them.
        if self.replicas is None or self.replicas.size() == 1:
            metric.distributed_available_fn = never
        elif metric.dist_sync_fn is None:
            metric.dist_sync_fn = _Among(self.replicas)

    def local(self) -> AbstractContextManager[None]:
        """In this context ``compute`` does not talk to the pipeline's other ranks."""
        return set_within(self, "_local", True)

    def note_changes(self, metrics: Collection[str]) -> None:
        """A step has changed these, on the rank where it ends. To be called after every step, on every rank."""
        self.steps += 1
        if not self._metrics.keys() >= set(metrics):
            self.refresh(named_metrics(self.module))
        self._changed |= {self._owners.get(name, name) for name in metrics}

    def share(self, names: Iterable[str] | None = None) -> None:
        """Give all ranks the states of metrics that changed: of outermost ``names``, or all. Collective.

        Needed before metrics with persistent states are saved.
        """
        changed = self._changed
        if names is not None:
            changed = changed & set(names)
        wanted = sorted(changed)
        if not wanted:
            return
        self._changed -= set(wanted)
        found = {}
        states = {}
        for owner in wanted:
            if owner not in self._metrics:
                continue
            for name, metric in members(self._metrics[owner]).items():
                key = f"{owner}:{name}"
                found[key] = metric
                states[key] = (metric.update_count, metric.metric_state)
        received = broadcast_structure(states, self.group, self.src, self.device)
        if self.group.rank() == self.src:
            return
        for name, (count, state) in received.items():
            for attribute, value in state.items():
                setattr(found[name], attribute, value)
            set_update_count(found[name], count)

    def close(self) -> None:
        """Give every metric its own ``compute`` and synchronization again."""
        for patched in self._patched.values():
            vars(patched.metric).update(patched.before)
        self._patched.clear()
