"""State that a training step changes for the next one: a step that has some cannot run once for each micro-batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from lightning_smddp.bridge.kept_tensors import changed_attributes, tensor_attributes
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.capture.own_seeds import seed_torch
from lightning_smddp.pipeline.capture.preserve_state import kept_parameters, preserve_state
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import CHECK_SEED, first_decides, refuse_foreign_writes
from lightning_smddp.wire.pytree import copied

_CARRIED = (
    "In a pipeline micro-batches would see each other's. State that is carried from batch to batch needs whole "
    "batches, one after the other."
)
_ROUNDING = 1e-5  # relative, of the loss of a step that is run a second time


def require_no_state(
    step: LightningStep,
    microbatches: Sequence[MicroBatch],
    changes: Sequence[str],
    device: torch.device,
) -> None:
    """Raise ``SplitError`` on every rank if micro-batches would see each other's state. Collective over all ranks.

    Args:
        step: a training step.
        microbatches: of the first batch.
        changes: of parameters and buffers, see ``StepGraph.once_a_batch``.
        device: of this rank.
    """
    refuse_changes(changes)
    world = dist.group.WORLD
    assert world is not None
    carried = first_decides(lambda: _find_carried(step, microbatches[0], device), world, device)
    if carried is not None:
        raise SplitError(carried)


def refuse_changes(changes: Sequence[str]) -> None:
    """Raise ``SplitError`` if the step writes parameters, which a pipeline's stages hold apart."""
    parameters = [change for change in changes if change.startswith("parameter")]
    if parameters:
        raise SplitError(
            f"The step changes {parameters[0]}, which in a pipeline happens once for each micro-batch, while others "
            "are on their way. Do it in a hook (`on_train_batch_end`), or use strategy='smddp' (strategy='smddp_fsdp' "
            "where the model does not fit on one device)."
        )


def _find_carried(step: LightningStep, microbatch: MicroBatch, device: torch.device) -> str | None:
    """What is wrong with the attribute that an earlier run of the step shows in; None if there is none."""
    module = step.module
    if any(parameter.device.type != device.type for parameter in module.parameters()):
        return None  # it is not whole
    # Twice on the same rows, with the same random numbers. In between attributes are not put back: what the first run
    # keeps there is seen by the second, as the next step would see it.
    with preserve_state(module, device), kept_parameters(module) as foreign:
        try:
            with step.around(None, 0, microbatch, keep=False):
                before = tensor_attributes(module)
                first = _loss(step, microbatch)
                refuse_foreign_writes(foreign.locations())
                changed = changed_attributes(before, tensor_attributes(module))
                if not changed or first is None:
                    return None
                try:
                    second = _loss(step, microbatch)
                except Exception:  # as with what it has kept nothing else has changed, this is the cause
                    return _carried_in(changed[0])
        finally:
            step.forget()
    if first != first:  # nan is no loss to compare with
        return None
    if second is not None:
        tolerance = _ROUNDING * max(abs(first), abs(second))
        if abs(second - first) <= tolerance:
            return None
    return _carried_in(changed[0])


def _carried_in(attribute: str) -> str:
    return (
        f"The step keeps tensors in {attribute} for the next step: run a second time on the same rows it gives another "
        f"loss. {_CARRIED}"
    )


def _loss(step: LightningStep, microbatch: MicroBatch) -> float | None:
    """Of one run, with the same random numbers each time."""
    seed_torch(CHECK_SEED)
    random.seed(CHECK_SEED)
    np.random.seed(CHECK_SEED)
    copy = MicroBatch(copied(microbatch.value), microbatch.size, microbatch.weight)
    return float(loss_of(step(copy), step.hook, detached=True).detach())
