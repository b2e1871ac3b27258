"""A batch that a pipeline could not finish is run again: on another course, or by all ranks with the whole module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.pipeline_metrics import PipelineMetrics
from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.communication.messages import gather_json
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.mesh import Groups
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.ownership import Ownership
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.runtime.trace_cache import TracedPath
from lightning_smddp.pipeline.runtime.transfer import gather_tensors
from lightning_smddp.pipeline.state.full_state import gather_full
from lightning_smddp.pipeline.state.optimizer_state import OptimizerPartition

Attempt: TypeAlias = tuple[Sequence[MicroBatch], Sequence[TracedPath]]

_COPIES = 4  # of all parameters, for training: they, their gradients, and two in the optimizer
_CURE = (
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
                raise LeftCourseError({index: f"{text} {_CURE}" for index, text in failures.items()}) from None
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


def require_whole_possible(
    error: SplitError, divided: PartitionedModule, groups: Groups, device: torch.device, options: PipelineOptions
) -> None:
    """Raise ``error``, with what to do, on every rank if the module cannot become whole in mid-training. Collective.

    Args:
        error: why the step cannot go on in a pipeline.
        divided: the module.
        groups: this rank's place.
        device: of this rank.
        options: the strategy's.
    """
    obstacle = None
    if options.fallback == "error" or options.meta_init:
        obstacle = "meta_init=True" if options.meta_init else "fallback='error'"
    if obstacle is None and groups.mesh.num_replicas > 1:
        obstacle = "there are several replicas, and others may go on as they are"
    if obstacle is None and device.type == "cuda":
        need = _COPIES * sum(p.numel() * p.dtype.itemsize for p in divided.module.parameters())
        free = torch.cuda.mem_get_info(device)[0]
        if not all(gather_json(need < free, groups.pipeline, device)):
            obstacle = "the model may not fit on one device"
    if obstacle is None:
        return
    if isinstance(error, StepFailedError):
        raise own_error(error) from None
    raise SplitError(f"{error} It cannot go on as a whole on every rank either: {obstacle}. {_CURE}") from None


def make_whole(
    divided: PartitionedModule, partitions: Sequence[OptimizerPartition], metrics: PipelineMetrics, device: torch.device
) -> None:
    """Every rank holds everything: parameters, gradients, and states of optimizers and metrics. Collective."""
    module, ownership, group = divided.module, divided.division.ownership, divided.groups.pipeline
    divided.window.tied.sum()
    gradients = gather_tensors(_own_gradients(module, ownership, group.rank()), group, to_all=True, device=device)
    states = [partition.full_state_dict(group, to_all=True, device=device) for partition in partitions]
    metrics.share()
    divided.close()
    divided.view.close()
    divided.hooks.take(dict(module.named_parameters()))  # also of absent ones, which lose them
    gather_full(module, ownership, group, device)
    divided.hooks.give_back()
    for partition, state in zip(partitions, states, strict=True):
        partition.give_back(state)
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name].to(device) if name in gradients else None


def _own_gradients(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, torch.Tensor]:
    named = dict(module.named_parameters())
    found = {name: named[name].grad for name in ownership.parameters if ownership.owner(name) == rank}
    return {name: gradient for name, gradient in found.items() if gradient is not None}
