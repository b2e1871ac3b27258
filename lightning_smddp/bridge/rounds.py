"""The micro-batches of a batch, run once, in as many rounds as ``active_microbatches`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.casts import kept_casts, may_keep_casts
from lightning_smddp.pipeline.runtime.trace_cache import TracedPath


def run_rounds(
    divided: PartitionedModule,
    step: LightningStep,
    options: PipelineOptions,
    context: Callable[[str], AbstractContextManager[Any]],
    microbatches: Sequence[MicroBatch],
    courses: Sequence[TracedPath],
) -> list[Any]:
    """What the step returned for each micro-batch, on the rank where it ends; else an empty list. Collective.

    Args:
        divided: the module.
        step: the user's.
        options: the strategy's.
        context: of a step: the precision plugin's.
        microbatches: of the batch.
        courses: of each.
    """
    size = options.active_microbatches or len(microbatches)
    looks = divided.looks(step, microbatches)
    outputs: list[Any] = []
    with _casting_once(divided, step, options, context, courses):
        for begin in range(0, len(microbatches), size):
            step.offset, now = begin, slice(begin, begin + size)
            outputs += divided.runtime.run(courses[now], step, microbatches[now], step.trains, looks=looks)
    return outputs


def _casting_once(
    divided: PartitionedModule,
    step: LightningStep,
    options: PipelineOptions,
    context: Callable[[str], AbstractContextManager[Any]],
    courses: Sequence[TracedPath],
) -> AbstractContextManager[None]:
    """Mixed precision casts each weight once for all micro-batches, where that makes no difference."""
    kinds = {staged.graph.cast_type for staged, _ in courses}
    if not step.trains or options.activation_checkpointing or None in kinds:
        return nullcontext()
    with context("training_step"):
        step.keeps_casts = may_keep_casts(kinds, divided.device)
    if not step.keeps_casts:
        return nullcontext()
    return kept_casts(divided.window.parameters.values(), lambda: context(step.hook))
