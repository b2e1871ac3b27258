"""torchmetrics objects under pipeline parallelism.

Metrics are called where the step ends, once for each micro-batch (:class:`StepMetrics`). There, and only there, is a
metric's state; :class:`PipelineMetrics` sends it to the other ranks when ``compute`` is called.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_smddp._compat.torch import (
    computes_batch_value,
    keep_compute_groups,
    set_update_count,
    without_torch_functions,
)
from lightning_smddp.bridge.absent import absent_like
from lightning_smddp.pipeline.capture.preserve_state import set_within
from lightning_smddp.pipeline.capture.tracer import open_modules
from lightning_smddp.pipeline.runtime.remote_tensor import active_run
from lightning_smddp.wire.pytree import map_leaves, tensors
from lightning_smddp.wire.stream import broadcast_object

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


# ---- in a step -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Method:
    """A method of the metric that is called ``name``, as it is while nothing is patched."""

    name: str
    metric: AnyMetric
    method: str
    original: Callable[..., Any]


class StepMetrics:
    """A module's metrics while steps run: called where the step ends, once for each micro-batch, in order.

    Elsewhere calls return numbers that cannot be read. What a trace has shown of the results' shapes, and whether they
    have gradients and so are a part of the step, is known from then on.

    Args:
        module: whose metrics.
        pipeline: the same on all ranks of this pipeline; None where there is one process.
    """

    def __init__(self, module: nn.Module, pipeline: PipelineMetrics | None = None) -> None:
        self.module = module
        self.pipeline = pipeline
        self._metrics: dict[str, AnyMetric] = {}
        self._names: dict[int, str] = {}
        self._functions: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        self._results: dict[tuple[str, str, bool], Any] = {}  # of a metric's method, with gradients or without
        self._called: dict[str, None] = {}  # in this batch
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes of those, and what they were
        self._needed: list[Any] | None = None
        self._plain: Callable[[Any], Any] | None = None
        self._busy = False
        self._is_known = False

    def find(self) -> None:
        """Look for the module's metrics: at the first batch, and where there may be others."""
        self._is_known = True
        metrics = named_metrics(self.module)
        if self.pipeline is not None:
            self.pipeline.refresh(metrics)
        if list(map(id, metrics.values())) == list(self._names):
            return
        self._metrics = metrics
        self._names = {id(metric): name for name, metric in metrics.items()}
        self._functions = []
        for name, metric in metrics.items():
            for method in _METHODS:
                # `forward` as the class has it: whoever wrapped the instance's wants to see the user's modules only.
                original = getattr(metric, method)
                if method == "forward":
                    original = type(metric).forward.__get__(metric)
                self._functions.append((metric, method, self._wrapped(_Method(name, metric, method, original))))

    def name_of(self, metric: Metric) -> str | None:
        """Its name in the module."""
        return self._names.get(id(metric))

    @contextmanager
    def patched(self, needed: list[Any] | None, plain: Callable[[Any], Any] | None) -> Iterator[None]:
        """Around a run of the step.

        Args:
            needed: gets what calls need where the step ends; None elsewhere.
            plain: makes arguments tensors of this rank, where they may be others.
        """
        if not self._is_known:
            self.find()
        self._needed, self._plain = needed, plain
        local = nullcontext() if self.pipeline is None else self.pipeline.local()
        with local, patched(self._functions):
            yield

    def called(self) -> list[str]:
        """Names of those that were called in this batch."""
        return list(self._called)

    def end(self, called: Collection[str]) -> None:
        """The batch is over, in which ``called`` were called where the step ends. On all ranks."""
        self._called.clear()
        self._before.clear()
        if self.pipeline is not None:
            self.pipeline.note_changes(called)

    def drop(self) -> None:
        """Metrics are as they were before the batch."""
        _put_back(self._before)
        self._called.clear()
        self._before.clear()

    def _wrapped(self, called: _Method) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # What a metric calls of itself, or of the metrics in it, is a part of the user's call.
            if self._busy:
                return called.original(*args, **kwargs)
            self._busy = True
            try:
                return self._call(called, args, kwargs)
            finally:
                self._busy = False

        return call

    def _call(self, called: _Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        open_modules(f"it calls `self.{called.name}`")
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors((args, kwargs)))
        key = (called.name, called.method, has_gradient)
        if key not in self._results and self._needed is not None:
            self._results[key] = self._tried(called, args, kwargs)
        result = self._results.get(key)
        if any(tensor.requires_grad for tensor in tensors(result)):
            return self._as_part_of_step(called, args, kwargs)
        if self._plain is not None:
            args, kwargs = self._plain((args, kwargs))
        args, kwargs = touched((args, kwargs))
        if self._needed is None:
            with without_torch_functions():
                return map_leaves(functools.partial(_absent, called.name), result)
        self._needed.append((args, kwargs))
        run = active_run()
        if run is not None:  # before its first module a stage hands out stand-ins of what it has received
            args, kwargs = map_leaves(run.real, (args, kwargs))
        with without_torch_functions():
            self._note(called)
            return called.original(*args, **kwargs)

    def _tried(self, called: _Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns, to know it by from here on."""
        with without_torch_functions(), isolated(called.metric), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it will warn again
            result = called.original(*args, **kwargs)
            if isinstance(called.metric, BaseAggregator):  # sums and means are no losses, and read what they are given
                result = detached(result)
            return map_leaves(_like, result)

    def _as_part_of_step(self, called: _Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._needed is None:
            with isolated(called.metric):
                return called.original(*args, **kwargs)
        self._note(called)
        return called.original(*args, **kwargs)

    def _note(self, called: _Method) -> None:
        """The metric is about to change: keep what it was before the batch."""
        if called.name in self._called:
            return
        self._called[called.name] = None
        self._before += _saved(called.metric)


@contextmanager
def isolated(metric: AnyMetric) -> Iterator[None]:
    """Let ``metric`` be used without a trace."""
    saved = _saved(metric)
    try:
        yield
    finally:
        _put_back(saved)


def _put_back(saved: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """All but the methods, which may be patched or not."""
    for attributes, before in saved:
        for name in attributes.keys() - before.keys() - set(_METHODS):
            del attributes[name]
        attributes.update((name, value) for name, value in before.items() if name not in _METHODS)


def _saved(metric: AnyMetric) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Attributes of ``metric`` and of those in it, and what they are: states, counts of updates, values computed."""
    saved = []
    for member in metric.modules():
        before = dict(vars(member))
        if isinstance(member, MetricCollection):
            keep_compute_groups(member)
        elif isinstance(member, Metric):
            for name, state in member.metric_state.items():  # which metrics write into
                before[name] = state.clone() if isinstance(state, Tensor) else list(state)
        saved.append((vars(member), before))
    return saved


def touched(structure: Any) -> Any:
    """``structure`` with its tensors touched."""
    return map_leaves(lambda leaf: touch(leaf) if isinstance(leaf, Tensor) else leaf, structure)


def touch(tensor: Tensor) -> Tensor:
    """Detach ``tensor``. Whoever traces a step learns by it where that is needed."""
    if has_torch_function((tensor,)):
        after: Tensor = handle_torch_function(touch, (tensor,), tensor)
        return after
    return tensor.detach()


def _like(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.zeros_like(leaf, requires_grad=leaf.requires_grad)
    return leaf


def _absent(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return absent_like(leaf, f"What `self.{name}` returns is known where the step ends alone, and is read elsewhere.")


def detached(structure: Any) -> Any:
    """``structure`` with its tensors off the graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, structure)


def never() -> bool:
    """As ``distributed_available_fn`` it keeps a metric from other processes."""
    return False


# ---- on all ranks ----------------------------------------------------------------------------------------------------


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
        received = broadcast_object(states, self.group, self.src, self.device)
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
