"""The micro-batches of a batch, run in rounds; again, on another path, where one of them leaves the path it was on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.casts import kept_casts, may_keep_casts
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.runtime.staged_step import TracedPath

Attempt: TypeAlias = tuple[Sequence[MicroBatch], Sequence[TracedPath]]

FROM_CHECKPOINT = (
    "When the step was traced it took another course. Give `fit` the last checkpoint as `ckpt_path`: the step is "
    "traced again then, as it is at that time."
)


class NewTailError(LeftCourseError):
    """Raised on every rank: what the step does behind its last module is new, and its weights may not fit it."""

    def __init__(self) -> None:
        super().__init__({0: "The step does something else behind its last module than before."})


def run_batch(
    divided: PartitionedModule,
    step: LightningStep,
    found: Attempt,
    find: Callable[[], Attempt],
    run: Callable[[Sequence[MicroBatch], Sequence[TracedPath]], list[Any]],
    begin: Callable[[int], None] = lambda _: None,
    drop: Callable[[], None] | None = lambda: None,
) -> list[Any]:
    """Run all micro-batches; again where one of them does something new behind its last module. Collective.

    Args:
        divided: the module.
        step: the user's.
        found: the batch's micro-batches, and their courses.
        find: finds them again.
        run: runs them once.
        begin: called with their number before each attempt.
        drop: called behind one that failed; None where that cannot be undone.

    Returns:
        What the step returned for each, on the rank where it ends; else an empty list.

    Raises:
        SplitError: on every rank: the step cannot be pipelined. Nothing of it is left.
        LeftCourseError: on every rank, without ``drop``.
    """
    while True:
        microbatches, courses = found
        begin(len(microbatches))
        try:
            with _undone_if_left(divided.module, courses, divided.device):
                outputs = run(microbatches, courses)
                if not divided.take_tails(step, drop is not None):
                    raise NewTailError
            divided.go_on(step)
            return outputs
        except NewTailError:
            assert drop is not None
            step.forget()
            step.offset = 0
            drop()
            found = find()  # compares the weights again
        except LeftCourseError as error:
            step.forget()
            divided.runtime.writes.put_back()
            failures = {step.offset + index: text for index, text in error.failures.items()}
            step.offset = 0
            if drop is None:
                with_cure = {index: f"{text} {FROM_CHECKPOINT}" for index, text in failures.items()}
                raise LeftCourseError(with_cure) from None
            drop()
            divided.learn(step, microbatches, courses, failures)
            found = find()


@contextmanager
def _undone_if_left(module: nn.Module, courses: Sequence[TracedPath], device: torch.device) -> Iterator[None]:
    """Where a course is left inside, put back torch's random numbers, and buffers that the step changes."""
    graphs = {id(staged): staged.graph for staged, _ in courses}.values()
    names = {name for graph in graphs for item in graph.nodes for name in item.buffers}
    buffers = [(b, b.detach().clone()) for name, b in module.named_buffers() if name in names] if names else []
    state = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    except LeftCourseError:
        torch.set_rng_state(state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        for buffer, value in buffers:
            buffer.detach().copy_(value)
        raise


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
    size = options.partition.active_microbatches or len(microbatches)
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
