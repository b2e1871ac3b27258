"""What a step that is repeated for micro-batches shows to Lightning: what one process with the whole batch would show.

On the rank that sees the end of the step, ``capture.py`` makes :class:`StepResults` of all micro-batches. They are
broadcast, and every rank of the pipeline applies them: each ``self.log`` call once, metrics, lists and attributes of
the module, and what the step returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp._compat.torch import set_forward_cache, set_update_count
from lightning_smddp.bridge.logged_values import Log
from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.step_attributes import AttrPath, apply_changes
from lightning_smddp.wire.broadcast import Channel, HeaderCache, broadcast_structure, in_containers_of


@dataclass
class StepResults:
    """What a step on a whole batch shows: plain data and tensors, so that it can be broadcast.

    Attributes:
        logs: calls of ``self.log``, in order.
        metrics: metrics that were called, with their update counts and forward caches.
        appended: items that lists of the module gained.
        attributes: what attributes of the module were set to.
        output: what the step returned.
    """

    logs: list[Log] = field(default_factory=list)
    metrics: dict[str, tuple[int, Any]] = field(default_factory=dict)
    appended: list[tuple[AttrPath, list[Any]]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    output: Any = None

    def apply(self, module: Any, metrics: PipelineMetrics | None = None) -> Any:
        """Show the step to Lightning. On every rank of the pipeline, inside the strategy's step method.

        Args:
            module: the LightningModule, whose ``log`` is called.
            metrics: is told which metrics changed.

        Returns:
            The step's output.
        """
        for log in self.logs:
            # What Lightning shows of a metric for a step is its forward cache, which only one rank's call has filled.
            value = log.value
            if log.metric is not None:
                value = module.get_submodule(log.metric)
                set_forward_cache(value, log.cache)
            module.log(log.name, value, **log.options)
        for name, (count, cache) in self.metrics.items():
            metric = module.get_submodule(name)
            set_forward_cache(metric, cache)
            if metric.update_count != count:  # else it may have computed, which stays valid
                set_update_count(metric, count)
        if metrics is not None:
            metrics.note_changes(self.metrics)
        apply_changes(module, self.appended, self.attributes)
        return self.output


def broadcast_results(
    results: StepResults | str | None,
    group: dist.ProcessGroup,
    src: int,
    device: torch.device,
    cache: HeaderCache | None = None,
    like: Any = None,
    host: Channel | None = None,
) -> StepResults | str:
    """The results of ``group``'s rank ``src`` on all its ranks. Collective.

    Args:
        results: on ``src`` what to send, or why there are none; elsewhere None.
        group: the ranks of the pipeline.
        src: rank in ``group`` of the one where the step ends.
        device: where collectives take their tensors from.
        cache: one for each kind of step; see :func:`broadcast_structure`.
        like: an output of the step, whose containers the received output gets.
        host: see :func:`broadcast_structure`.

    Raises:
        ValueError: on every rank: the step returned, appended or set something that cannot be sent.
    """
    received = broadcast_structure(results, group, src, device, cache=cache, host=host)
    if isinstance(received, (StepResults, str)):
        return received
    received["logs"] = [Log(**log) for log in received["logs"]]
    received["output"] = in_containers_of(like, received["output"])
    return StepResults(**received)
