"""Finds out by running a step whether the first dimension of its batches is that of their rows.

Rows can change places: neither the loss of a batch nor what is logged for it depends on their order, and each row has
the same prediction as before. Steps in time cannot. And the loss of rows is made up of the losses of their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.bridge.run_setup import RunSetup
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_results import Observed, StepResults
from lightning_smddp.pipeline.capture.constant_random import ConstantRandom
from lightning_smddp.pipeline.capture.preserve_state import kept_parameters, preserve_state
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, combine
from lightning_smddp.pipeline.partition.plan import first_decides
from lightning_smddp.pipeline.partition.row_evidence import Evidence, has_time_first
from lightning_smddp.pipeline.partition.weight_trials import EXACT, find_weighting
from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.pytree import leaves, map_leaves, tensors

_TOLERANCE = 1e-5  # relative; rounding in another order is less


def rows_by_loss(
    step: LightningStep,
    batch: MicroBatch,
    found: Evidence,
    setup: RunSetup,
) -> bool:
    """Whether rows come first in batches of a training step: the first rank tries it. Collective over the pipeline.

    Args:
        step: the training step.
        batch: all of one.
        found: what its shapes say.
        setup: of the run; the module is whole.
    """
    module = setup.module

    def loss(microbatch: MicroBatch) -> float:
        return float(loss_of(step.observed([microbatch]).results.output, step.hook, detached=True))

    def decide() -> bool:
        for trains in (False, True):  # some models do something else in evaluation mode
            with preserve_state(module, setup.device), kept_parameters(module), ConstantRandom(), torch.no_grad():
                module.train(trains)
                answer = _try_order(loss, batch, found)
            if answer is not None:
                return answer
        return found == "square" and not has_time_first(module)

    return bool(first_decides(decide, setup.groups.pipeline, setup.device))


def _try_order(loss: Callable[[MicroBatch], float], batch: MicroBatch, found: Evidence) -> bool | None:
    """Whether rows can change places; None if the loss is random, or the step cannot be run."""
    order = order_of(batch.size)
    try:
        whole = loss(batch)
        if not _close(whole, loss(batch)):
            return None
        rows_free = _close(whole, loss(batch.with_rows_in(order)))
        if found == "doubt":
            return rows_free and _made_up_of_parts(loss, batch, whole)
        columns_free = _close(whole, loss(replace(batch, value=_with_columns_in_order(batch.value, order))))
        if not columns_free:
            return True  # the second dimension is not that of the rows, and one of the two is
        return rows_free and _made_up_of_parts(loss, batch, whole)
    except Exception:  # whatever the step raises: it will again, where it counts
        return None


def _made_up_of_parts(loss: Callable[[MicroBatch], float], batch: MicroBatch, whole: float) -> bool:
    """Whether some weights make the loss of the batch of those of its halves."""
    weighting, _ = find_weighting(loss, batch, lambda value: replace(batch, value=value).split(2))
    predicted = sum(part.weight * loss(part) for part in weighting.apply(batch.split(2)))
    return _close(whole, predicted, EXACT)


def _with_columns_in_order(value: Any, order: list[int]) -> Any:
    """As if the second dimension of square tensors were the rows."""

    def ordered(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if leaf.dim() > 1 and leaf.shape[:2] == (len(order), len(order)):
            return leaf[:, order]
        return leaf[order] if leaf.shape[0] == len(order) else leaf

    return map_leaves(ordered, value)


def rows_by_results(run: Callable[[MicroBatch], Observed | None], batch: MicroBatch, setup: RunSetup) -> bool:
    """The same for an evaluation step, by its results on the rank where it ends. Collective over the pipeline.

    Args:
        run: the step for nothing, through the pipeline.
        batch: all rows.
        setup: of the run.
    """
    parts = batch.split(2)
    observed = [run(rows) for rows in (batch, batch.with_rows_in(order_of(batch.size)), *parts)]
    found = False
    if setup.ends_here:
        whole, permuted, *halves = [some.results for some in observed if some is not None]
        outputs = _same_outputs(whole.output, [half.output for half in halves], [part.size for part in parts])
        found = bool(whole.logs) if outputs is None else outputs
        found = found and _same_logs(whole, permuted)
    return bool(broadcast_json(found, setup.groups.pipeline, setup.device, setup.last_rank))


def _same_outputs(whole: Any, halves: list[Any], sizes: list[int]) -> bool | None:
    """Whether the halves' outputs make up the whole's; None if there are no tensors to compare."""
    if not tensors(whole):
        return None
    try:
        combined = tensors(combine(halves, sizes))
    except ValueError:
        return False
    pairs = list(zip(tensors(whole), combined, strict=False))
    return all(one.shape == other.shape and torch.allclose(one, other, 1e-4, 1e-6) for one, other in pairs)


def _same_logs(whole: StepResults, permuted: StepResults) -> bool:
    values = [[leaf for leaf in leaves([log.value for log in r.logs]) if _is_number(leaf)] for r in (whole, permuted)]
    return all(_close(float(one), float(other)) for one, other in zip(*values, strict=False))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float)) or (isinstance(leaf, Tensor) and leaf.numel() == 1)


def order_of(count: int) -> list[int]:
    """Some order of ``count`` rows that is neither the usual one nor its reverse, as far as there are others."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    usual = list(range(count))
    if order in (usual, usual[::-1]):
        order = usual[1:] + usual[:1]
    return order


def _close(one: float, other: float, tolerance: float = _TOLERANCE) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
