"""torchmetrics objects under pipeline parallelism.

Metrics are called where the step ends, once for each micro-batch (:class:`StepMetrics`). There, and only there, is a
metric's state; :class:`PipelineMetrics` sends it to the other ranks when ``compute`` is called.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
def patched(values: Iterable[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Set attributes of module instances, and put back what was there."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module, name, value in values:
            attributes = vars(module)
            undo.append((attributes, name, attributes.get(name)))
            attributes[name] = value
        yield
    finally:
        for attributes, name, before in reversed(undo):
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before


# ---- in a step -------------------------------------------------------------------------------------------------------


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
        self._names: dict[int, str] | None = None  # by id; None before the first batch
        self._functions: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        self._results: dict[tuple[str, str, bool], Any] = {}  # of a metric's method, with gradients or without
        self._called: dict[str, None] = {}  # in this batch
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes of those, and what they were
        self._needed: list[Any] | None = None
        self._plain: Callable[[Any], Any] | None = None
        self._busy = False

    def find(self) -> None:
        """Look for the module's metrics: at the first batch, and where there may be others."""
        metrics = named_metrics(self.module)
        if self.pipeline is not None:
            self.pipeline.refresh(metrics)
        names = {id(metric): name for name, metric in metrics.items()}
        if names == self._names:
            return
        self._names = names
        self._functions = []
        for name, metric in metrics.items():
            for method in _METHODS:
                self._functions.append((metric, method, self._wrapped(name, metric, method)))

    def name_of(self, metric: Metric) -> str | None:
        """Its name in the module."""
        return (self._names or {}).get(id(metric))

    @contextmanager
    def patched(self, needed: list[Any] | None, plain: Callable[[Any], Any] | None) -> Iterator[None]:
        """Around a run of the step.

        Args:
            needed: gets what calls need where the step ends; None elsewhere.
            plain: makes arguments tensors of this rank, where they may be others.
        """
        if self._names is None:
            self.find()
        self._needed, self._plain = needed, plain
        local = nullcontext() if self.pipeline is None else set_within(self.pipeline, "is_local", True)
        with local, patched(self._functions):
            yield

    def called(self) -> list[str]:
        """Names of those that were called in this batch."""
        return list(self._called)

    def end(self, called: Iterable[str]) -> None:
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

    def _wrapped(self, name: str, metric: AnyMetric, method: str) -> Callable[..., Any]:
        # `forward` as the class has it: whoever wrapped the instance's wants to see the user's modules only.
        original = type(metric).forward.__get__(metric) if method == "forward" else getattr(metric, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            # What a metric calls of itself, or of the metrics in it, is a part of the user's call.
            if self._busy:
                return original(*args, **kwargs)
            with set_within(self, "_busy", True):
                open_modules(f"it calls `self.{name}`")
                return self._call(name, metric, functools.partial(original, *args, **kwargs), method)

        return call

    def _call(self, name: str, metric: AnyMetric, call: functools.partial[Any], method: str) -> Any:
        given = (call.args, call.keywords)
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors(given))
        key = (name, method, has_gradient)
        if key not in self._results and self._needed is not None:
            self._results[key] = _tried(metric, call)
        result = self._results.get(key)
        if any(tensor.requires_grad for tensor in tensors(result)):  # a loss: a part of the step on each stage
            if self._needed is not None:
                self._note(name, metric)
                return call()
            with _isolated(metric):
                return call()
        if self._plain is not None:
            given = self._plain(given)
        given = map_leaves(lambda leaf: touch(leaf) if isinstance(leaf, Tensor) else leaf, given)
        if self._needed is None:
            with without_torch_functions():
                return map_leaves(functools.partial(_absent, name), result)
        self._needed.append(given)
        run = active_run()
        if run is not None:  # before its first module a stage hands out placeholders of what it has received
            given = map_leaves(run.real, given)
        with without_torch_functions():
            self._note(name, metric)
            return call.func(*given[0], **given[1])

    def _note(self, name: str, metric: AnyMetric) -> None:
        """The metric is about to change: keep what it was before the batch."""
        if name not in self._called:
            self._called[name] = None
            self._before += _saved(metric)


def _tried(metric: AnyMetric, call: Callable[[], Any]) -> Any:
    """What a call returns, to know it by from here on: zeros, with gradients or without."""
    with without_torch_functions(), _isolated(metric), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it will warn again
        # Sums and means are no losses, and read what they are given.
        is_loss = not isinstance(metric, BaseAggregator)
        return map_leaves(functools.partial(_like, is_loss=is_loss), call())


@contextmanager
def _isolated(metric: AnyMetric) -> Iterator[None]:
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


def touch(tensor: Tensor) -> Tensor:
    """Detach ``tensor``. Whoever traces a step learns by it where that is needed."""
    if has_torch_function((tensor,)):
        after: Tensor = handle_torch_function(touch, (tensor,), tensor)
        return after
    return tensor.detach()


def _like(leaf: Any, is_loss: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.zeros_like(leaf, requires_grad=leaf.requires_grad and is_loss)


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


@dataclass
class _Among:
    """torchmetrics' ``dist_sync_fn``: exchange among ``group`` where the metric names no group of its own."""

    group: dist.ProcessGroup | None

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(tensor, self.group if group is None else group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Among:
        return self  # process groups cannot be copied

    def __reduce__(self) -> Any:
        return _Among, (None,)  # nor sent to another process


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

    Attributes:
        is_local: ``compute`` does not talk to the pipeline's other ranks: a step is running.
    """

    module: nn.Module
    group: dist.ProcessGroup
    src: int
    device: torch.device
    replicas: dist.ProcessGroup | None = None
    is_local: bool = field(default=False, init=False)
    _changed: set[str] = field(default_factory=set, init=False)  # names of outermost metrics
    _outermost: dict[str, AnyMetric] = field(default_factory=dict, init=False)  # metrics and collections, in no other
    _owners: dict[str, str] = field(default_factory=dict, init=False)  # of each metric: the outermost one that it is in
    _patched: dict[int, tuple[Metric, dict[str, Any]]] = field(default_factory=dict, init=False)  # what attributes were
    _computes: dict[int, Callable[..., Any]] = field(default_factory=dict, init=False)  # in place of `compute`

    def __post_init__(self) -> None:
        """Take over the metrics that the module has now; later ones are found by :meth:`refresh`."""
        self.refresh(named_metrics(self.module))

    def refresh(self, metrics: dict[str, AnyMetric]) -> None:
        """Patch metrics that are new, as those that a ``MetricTracker`` made are.

        A trial of the step puts back the attributes of all modules: a metric that was patched in it is patched again.
        """
        self._outermost, self._owners = {}, {}
        for name, metric in metrics.items():  # what a metric is in comes before it
            owner = next((other for other in self._outermost if name.startswith(f"{other}.")), name)
            self._outermost.setdefault(owner, metric)
            self._owners[name] = owner
            if isinstance(metric, Metric) and vars(metric)["compute"] is not self._computes.get(id(metric)):
                self._patch(owner, metric)

    def _patch(self, owner: str, metric: Metric) -> None:
        if isinstance(metric.dist_sync_fn, _Among):  # a copy of a patched metric
            metric.dist_sync_fn = None
        if metric.distributed_available_fn is never:
            metric.distributed_available_fn = jit_distributed_available
        self._patched[id(metric)] = (metric, {key: vars(metric)[key] for key in _ATTRIBUTES})
        # `compute` is called on all ranks alike, and only the rank where the step ends has the state: so that is sent
        # first. What `forward` returns is for one batch alone, and needs no state of another rank.
        compute = metric.compute

        def shared_compute(*args: Any, **kwargs: Any) -> Any:
            if not self.is_local and not computes_batch_value(metric):
                self.share([owner])
            return compute(*args, **kwargs)

        vars(metric)["compute"] = self._computes[id(metric)] = shared_compute
        # By itself torchmetrics would exchange states among all ranks of the world: that of a pipeline, which all its
        # ranks then have, would count once for each of them.
        if self.replicas is None or self.replicas.size() == 1:
            metric.distributed_available_fn = never
        elif metric.dist_sync_fn is None:
            metric.dist_sync_fn = _Among(self.replicas)

    def note_changes(self, metrics: Iterable[str]) -> None:
        """A step has changed these, on the rank where it ends. To be called after every step, on every rank."""
        names = set(metrics)
        if not self._owners.keys() >= names:
            self.refresh(named_metrics(self.module))
        self._changed |= {self._owners.get(name, name) for name in names}

    def share(self, names: Iterable[str] | None = None) -> None:
        """Give all ranks the states of metrics that changed: of outermost ``names``, or all. Collective.

        Needed before metrics with persistent states are saved.
        """
        wanted = sorted(self._changed if names is None else self._changed.intersection(names))
        self._changed.difference_update(wanted)
        found = []
        for owner in wanted:
            if owner in self._outermost:
                found += [part for part in self._outermost[owner].modules() if isinstance(part, Metric)]
        if not found:
            return
        states = [(metric.update_count, metric.metric_state) for metric in found]
        received = broadcast_object(states, self.group, self.src, self.device)
        if self.group.rank() == self.src:
            return
        for metric, (count, state) in zip(found, received, strict=True):
            vars(metric).update(state)
            set_update_count(metric, count)

    def close(self) -> None:
        """Give every metric its own ``compute`` and synchronization again."""
        for metric, before in self._patched.values():
            vars(metric).update(before)
        self._patched.clear()
        self._computes.clear()
