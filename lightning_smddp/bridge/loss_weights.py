"""The one trial of ``loss_weight="auto"``: the first batch against its micro-batches, forward only, in eval mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.communication.objects import broadcast
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.loss_weights import (
    EXACT,
    MIXED,
    LossWeight,
    best_fit,
    candidates,
)
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import own_error

_SEEDS = (20240229, 20250131)  # of the whole batch: a loss that follows them is chance


def find_loss_weight(
    partitioned: PartitionedModule,
    step: LightningStep,
    whole: MicroBatch,
    microbatches: Sequence[MicroBatch],
) -> tuple[LossWeight, str | None]:
    """What makes the micro-batches' losses the batch's, through the pipeline. Collective over all ranks.

    Args:
        partitioned: the module.
        step: whose loss.
        whole: the first batch.
        microbatches: that it was cut into, weighted by rows.

    Returns:
        The weights, the same on all ranks, and a row for the table where none was found to be right.
    """
    # Replicas have other batches: all of them take part, and the first one's batch decides.
    setup = partitioned.setup
    losses: list[float] | str
    try:
        losses = _losses(partitioned, step.unscaled(trains=False), whole, microbatches)
    except Exception as error:  # on every rank: the step is not made for eval mode, or whole batches are too large
        losses = repr(own_error(error))
    found: Any = None
    if partitioned.runtime.ends_here and setup.groups.replica == 0:
        weight, note = _decide(partitioned, losses, whole, microbatches)
        found = [weight.to_json(), note]
    source = setup.groups.mesh.pipelines[0][setup.last_rank]
    found, note = broadcast(found, setup.world, source)
    return LossWeight.from_json(found), note


def _losses(
    partitioned: PartitionedModule,
    step: LightningStep,
    whole: MicroBatch,
    microbatches: Sequence[MicroBatch],
) -> list[float]:
    """Of the whole batch, twice, and of each micro-batch, on the rank where the step ends; else nothing."""
    module, device = partitioned.setup.module, partitioned.setup.device
    outputs: list[Any] = []
    for number, parts in enumerate(([whole], [whole], microbatches)):
        with preserve_state(module, device), torch.no_grad():
            module.eval()
            step.seed = _SEEDS[number % 2]
            try:
                paths = partitioned.paths(step, parts)
                outputs += partitioned.runtime.require_success(partitioned.runtime.run(paths, step, parts, False))
            finally:
                step.forget()
    # Only now: what this rank alone may raise would leave the others in the next run.
    return [float(loss_of(output, step.hook, detached=True)) for output in outputs]


def _decide(
    partitioned: PartitionedModule,
    losses: list[float] | str,
    whole: MicroBatch,
    microbatches: Sequence[MicroBatch],
) -> tuple[LossWeight, str | None]:
    if isinstance(losses, str):
        return LossWeight(), f"micro-batches count by rows, as the step fails in eval mode on a batch: {losses}"
    first, again, *rest = losses
    tolerance = EXACT if partitioned.plan.is_exact else MIXED
    return best_fit(candidates(whole.value), (first, again), rest, microbatches, tolerance)
