"""The state of torchmetrics objects under pipeline parallelism: on one rank, until someone asks for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_smddp._compat.torch import computes_batch_value, set_update_count
from lightning_smddp.bridge.step_metrics import AnyMetric, named_metrics, never
from lightning_smddp.pipeline.capture.patches import set_within
from lightning_smddp.wire.broadcast import broadcast_structure

_ATTRIBUTES = ("compute", "dist_sync_fn", "distributed_available_fn")


def members(metric: nn.Module) -> dict[str, Metric]:
    """``metric`` and the metrics in it, by name within it."""
    return {name: found for name, found in metric.named_modules() if isinstance(found, Metric)}


def owners(metrics: Iterable[str]) -> dict[str, str]:
    """For each metric the outermost metric or collection that it is part of."""
    found: dict[str, str] = {}
    for name in sorted(metrics, key=len):
        parts = name.split(".")
        prefixes = (".".join(parts[:n]) for n in range(1, len(parts)))
        found[name] = next((prefix for prefix in prefixes if prefix in found), name)
    return found


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
        """Patch the metrics."""
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
        compute = metric.compute

        def shared_compute(*args: Any, **kwargs: Any) -> Any:
            if not self._local and not computes_batch_value(metric):
                self.share([self._owners.get(name, name)])
            return compute(*args, **kwargs)

        vars(metric)["compute"] = shared_compute
        self._patched[id(metric)] = _Patched(metric, before, shared_compute)
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
        wanted = sorted(self._changed if names is None else self._changed & set(names))
        if not wanted:
            return
        self._changed -= set(wanted)
        present = [owner for owner in wanted if owner in self._metrics]
        found = {f"{owner}:{name}": m for owner in present for name, m in members(self._metrics[owner]).items()}
        states = {name: (metric.update_count, metric.metric_state) for name, metric in found.items()}
        received = broadcast_structure(states, self.group, self.src, self.device)
        if self.group.rank() == self.src:
            return
        for name, (count, state) in received.items():
            for attribute, value in state.items():
                setattr(found[name], attribute, value)
            set_update_count(found[name], count)

    def close(self) -> None:
        """Put back every attribute."""
        for patched in self._patched.values():
            vars(patched.metric).update(patched.before)
        self._patched.clear()
