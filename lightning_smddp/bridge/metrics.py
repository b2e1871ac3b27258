"""torchmetrics objects under pipeline parallelism.

Metrics are called where the step ends, once for each micro-batch. There, and only there, is a metric's state, which is
sent to the other ranks when ``compute`` is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torchmetrics import Metric, MetricCollection

from lightning_smddp._compat.torch import (
    computes_batch_value,
    keep_compute_groups,
    set_metric_state,
    without_torch_functions,
)
from lightning_smddp.bridge.absent import absent_tensor
from lightning_smddp.communication.tensors import CPU, broadcast_structure
from lightning_smddp.patches import Patch, patched
from lightning_smddp.pipeline.capture.tracer import open_modules
from lightning_smddp.pipeline.runtime.remote_tensor import ACTIVE
from lightning_smddp.pytree import detached, map_leaves, map_tensors, tensors

AnyMetric: TypeAlias = "Metric | MetricCollection"
Plain: TypeAlias = Callable[[Any], Any]
"""Makes tensors in a structure those of this rank."""
Saved: TypeAlias = list[tuple[dict[str, Any], dict[str, Any]]]
"""Attributes of metrics, and what they were."""

_METHODS = ("forward", "update", "compute", "reset")


class PipelineMetrics:
    """A module's metrics: called where the step ends, once for each micro-batch, in order.

    Elsewhere calls return numbers that cannot be read, of the shapes that a trace has shown. When ``compute`` is called
    after steps, which has to happen on all ranks of the pipeline alike, the state is broadcast first.

    Args:
        module: whose metrics.
        group: the ranks of the pipeline; None where there is one process.
        src: the rank in ``group`` where the step ends.
        device: where collectives take their tensors from.
        replicas: the ranks that hold the same stage in other pipelines; None if there is one pipeline only.

    Attributes:
        names: of metrics in the module, by id; None before the first batch.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        src: int = 0,
        device: torch.device = CPU,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.module = module
        self.group = group
        self.src = src
        self.device = device
        self.replicas = replicas
        self.names: dict[int, str] | None = None
        self._functions: list[Patch] = []  # in place of methods
        self._results: dict[tuple[str, str], Any] = {}  # what a metric's method has returned once
        self._before: dict[str, Saved] = {}  # what those that were called in this batch were before it
        self._needed: list[Any] | None = None
        self._plain: Plain | None = None
        self._in_step = False
        self._in_call = False
        self._changed: set[int] = set()  # ids of those whose state other ranks lack
        self._take_over(module)

    @property
    def called(self) -> list[str]:
        """Names of those that were called in this batch."""
        return list(self._before)

    def find(self) -> None:
        """Look for the module's metrics: at the first batch, and where there may be others."""
        self._take_over(self.module)
        names = {}
        functions = []
        for name, module in self.module.named_modules():
            if isinstance(module, (Metric, MetricCollection)):
                names[id(module)] = name
                functions += [(vars(module), method, self._wrapped(name, module, method)) for method in _METHODS]
        if names != self.names:
            self.names, self._functions = names, functions

    # ---- in a step ----

    def patches(self, needed: list[Any] | None, plain: Plain | None) -> list[Patch]:
        """What is in place during the next run of the step.

        Args:
            needed: gets what calls need where the step ends; None elsewhere.
            plain: makes arguments tensors of this rank, where they may be others.
        """
        if self.names is None:
            self.find()
        self._needed, self._plain = needed, plain
        return [(vars(self), "_in_step", True), *self._functions]

    def end(self, called: Iterable[str]) -> None:
        """The batch is over, in which ``called`` were called where the step ends. On all ranks."""
        self._before.clear()
        for name in called:
            metric = self.module.get_submodule(name)
            self._take_over(metric)
            self._changed.update(map(id, _metrics_in(metric)))

    def drop(self) -> None:
        """Metrics are as they were before the batch."""
        for saved in self._before.values():
            _put_back(saved)
        self._before.clear()

    def _wrapped(self, name: str, metric: AnyMetric, method: str) -> Callable[..., Any]:
        # `forward` as the class has it: whoever wrapped the instance's wants to see the user's modules only.
        original = type(metric).forward.__get__(metric) if method == "forward" else getattr(metric, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            # What a metric calls of itself, or of the metrics in it, is a part of the user's call.
            if self._in_call:
                return original(*args, **kwargs)
            with patched([(vars(self), "_in_call", True)]):
                open_modules(f"it calls `self.{name}`")
                if method == "forward" and _is_loss(metric, (args, kwargs)):
                    # It is a part of the step on each stage, and counts where the step ends.
                    saved = _saved(metric)
                    result = original(*args, **kwargs)
                    if self._needed is None:
                        _put_back(saved)
                    else:
                        self._before.setdefault(name, saved)
                    return result
                return self._call(name, metric, method, original, (args, kwargs))

        return call

    def _call(self, name: str, metric: AnyMetric, method: str, original: Callable[..., Any], given: Any) -> Any:
        if self._plain is not None:
            given = self._plain(given)
        given = map_tensors(touch, given)
        if self._needed is None:
            text = f"What `self.{name}` returns is known where the step ends alone, and is read elsewhere."
            result = self._results.get((name, method))
            with without_torch_functions():
                return map_tensors(functools.partial(absent_tensor, text), result)
        self._needed.append(given)
        run = ACTIVE.run
        if run is not None:  # before its first module a stage hands out placeholders of what it has received
            given = map_leaves(run.real, given)
        with without_torch_functions():
            if name not in self._before:
                self._before[name] = _saved(metric)
            args, kwargs = given
            result = original(*args, **kwargs)
            if (name, method) not in self._results:
                self._results[name, method] = detached(result)
        return result

    # ---- on all ranks ----

    def _take_over(self, root: nn.Module) -> None:
        """Make ``compute`` right on all ranks, of metrics that are new, as those that a ``MetricTracker`` made are.

        A trial of the step puts back the attributes of all modules: a metric that was taken over in it is again.
        """
        for metric in _metrics_in(root) if self.group is not None else ():
            if getattr(metric.compute, "func", None) != self._compute:
                vars(metric)["compute"] = functools.partial(self._compute, metric, metric.compute)

    def _compute(self, metric: Metric, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # It is called on all ranks alike, and only the rank where the step ends has the state: so that is sent first.
        # What `forward` returns is for one batch alone, and needs no state of another rank.
        if not self._in_step and not computes_batch_value(metric):
            self.share(metric)
        # By itself torchmetrics would exchange states among all ranks of the world: that of a pipeline, which all its
        # ranks then have, would count once for each of them.
        has_replicas = self.replicas is not None
        group = metric.process_group or self.replicas
        own: Any = vars(metric)
        with patched([(own, "distributed_available_fn", lambda: has_replicas), (own, "process_group", group)]):
            return compute(*args, **kwargs)

    def share(self, metric: nn.Module | None = None) -> None:
        """Give all ranks the states of metrics that changed: of this one and those in it, or of all. Collective.

        Needed before metrics with persistent states are saved.
        """
        root = self.module if metric is None else metric
        found = [metric for metric in _metrics_in(root) if id(metric) in self._changed]
        self._changed.difference_update(map(id, found))
        if not found or self.group is None:
            return
        states = [(metric.update_count, metric.metric_state) for metric in found]
        received = broadcast_structure(states, self.group, self.src, self.device)
        if self.group.rank() == self.src:
            return
        for metric, (count, state) in zip(found, received, strict=True):
            set_metric_state(metric, count, state)

    def close(self) -> None:
        """Give every metric its own ``compute`` and synchronization again."""
        for metric in _metrics_in(self.module):
            compute: Any = metric.compute
            if getattr(compute, "func", None) == self._compute:
                vars(metric)["compute"] = compute.args[1]


def _is_loss(metric: AnyMetric, given: Any) -> bool:
    """Whether what ``forward`` returns has a gradient: torchmetrics' classes say of themselves if it can have one."""
    is_differentiable = getattr(metric, "is_differentiable", False) and torch.is_grad_enabled()
    return is_differentiable and any(tensor.requires_grad for tensor in tensors(given))


def _put_back(saved: Saved) -> None:
    """All but the methods, which may be patched or not."""
    for attributes, before in saved:
        for name in attributes.keys() - before.keys() - set(_METHODS):
            del attributes[name]
        attributes.update((name, value) for name, value in before.items() if name not in _METHODS)


def _saved(metric: AnyMetric) -> Saved:
    """Of ``metric`` and of those in it: states, counts of updates, values computed."""
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


def _metrics_in(root: nn.Module) -> list[Metric]:
    return [module for module in root.modules() if isinstance(module, Metric)]
