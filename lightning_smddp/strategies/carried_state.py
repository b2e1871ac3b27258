"""State that a training step changes for the next one: a step that has some cannot run once for each micro-batch."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_smddp.pipeline.division import CHECK_SEED, first_decides
from lightning_smddp.pipeline.microbatches import MicroBatch
from lightning_smddp.pipeline.program import SplitError
from lightning_smddp.pipeline.structure import copied, tensors
from lightning_smddp.pipeline.untouched import kept_parameters, untouched
from lightning_smddp.strategies.pipeline_step import LightningStep, loss_of

_ROUNDING = 1e-5  # relative, of the loss of a step that is run a second time


def require_no_state(
    step: LightningStep, microbatches: Sequence[MicroBatch], changes: Sequence[str], device: torch.device
) -> None:
    """Raise ``SplitError`` on every rank if micro-batches would see each other's state. Collective over all ranks.

    Args:
        step: a training step.
        microbatches: of the first batch.
        changes: of parameters and buffers, see ``Program.once_a_batch``.
        device: of this rank.
    """
    parameters = [change for change in changes if change.startswith("parameter")]
    if parameters or (changes and len(microbatches) > 1):
        raise SplitError(
            f"The step changes {(parameters or changes)[0]}: in a pipeline this would happen once for each of "
            f"{len(microbatches)} micro-batches instead of once for a batch. Do it in a hook (`on_train_batch_end`)"
            + (", or use num_microbatches=1." if not parameters else ".")
        )
    world = dist.group.WORLD
    assert world is not None
    carried = first_decides(lambda: _find_carried(step, microbatches[0], device), world, device)
    if carried is not None:
        raise SplitError(
            f"The step keeps tensors in {carried} for the next step: run a second time on the same rows it gives "
            "another loss. In a pipeline micro-batches would see each other's. State that is carried from batch to "
            "batch needs whole batches, one after the other."
        )


def _find_carried(step: LightningStep, microbatch: MicroBatch, device: torch.device) -> str | None:
    """The attribute that an earlier run of the step on the same rows shows in; None if there is none."""
    module = step.module
    if any(parameter.device.type != device.type for parameter in module.parameters()):
        return None  # it is not whole
    with untouched(module, device), kept_parameters(module):
        before = _tensor_attributes(module)
        try:
            with step.around(0, microbatch, keep=False):
                first = _loss(step, microbatch)
                now = _tensor_attributes(module)
                changed = [name for name, found in now.items() if not _same(before.get(name), found)]
                if not changed or first is None:
                    return None
                try:
                    second = _loss(step, microbatch)
                except Exception:  # as with what it has kept nothing else has changed, this is the cause
                    return changed[0]
        finally:
            step.forget()
    same = second is not None and abs(second - first) <= _ROUNDING * max(abs(first), abs(second))
    return None if same or first != first else changed[0]


def _loss(step: LightningStep, microbatch: MicroBatch) -> float | None:
    """Of one run, with the same random numbers each time."""
    torch.manual_seed(CHECK_SEED)
    random.seed(CHECK_SEED)
    np.random.seed(CHECK_SEED)
    copy = MicroBatch(copied(microbatch.value), microbatch.size, microbatch.weight)
    return float(loss_of(step(copy), step.hook, detached=True).detach())


def _tensor_attributes(module: nn.Module) -> dict[str, list[Tensor]]:
    """Each attribute of a module in which there are tensors, but parameters and buffers, and which ones."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_") and name in _OWN:
                continue
            inside = tensors(value) if isinstance(value, (Tensor, list, tuple, dict)) else []
            if inside:
                found[".".join(["self", *filter(None, path.split(".")), name])] = inside
    return found


_OWN = frozenset(vars(nn.Module()))


def _same(before: list[Tensor] | None, now: list[Tensor]) -> bool:
    """Whether these are the same objects."""
    return before is not None and len(before) == len(now) and all(map(operator.is_, before, now))
