"""One batch of a partitioned module: a training step forward and backward, in :meth:`Training.run`.

Its micro-batches run in rounds; again, on another path, where one of them leaves the path that it was on. Evaluation
steps do so, too (:func:`run_batch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from lightning_smddp.bridge.batch_cutting import BatchCutter
from lightning_smddp.bridge.batch_results import BatchResults
from lightning_smddp.bridge.checks import SecondCheck
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.path_trials import PathTrials
from lightning_smddp.bridge.run_setup import RunSetup
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.casts import kept_casts, may_keep_casts
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.runtime.draws import generator_states, set_generator_states
from lightning_smddp.pipeline.runtime.staged_step import TracedPath

Attempt: TypeAlias = tuple[Sequence[MicroBatch], Sequence[TracedPath]]
"""What is to be run: the micro-batches of a batch, and for each the path that the step is expected to take on it."""

FROM_CHECKPOINT = (
    "When the step was traced it took another course. Give `fit` the last checkpoint as `ckpt_path`: the step is "
    "traced again then, as it is at that time."
)


class NewTailError(LeftCourseError):
    """Raised on every rank: what the step does behind its last module is new, and its weights may not fit it."""

    def __init__(self) -> None:
        super().__init__({0: "The step does something else behind its last module than before."})


class Training:
    """Runs training steps, with the trials that a batch gives reason for before or behind it.

    Args:
        setup: of the run.
        cutter: cuts batches into micro-batches.
        results: combines what micro-batches give.
    """

    def __init__(self, setup: RunSetup, cutter: BatchCutter, results: BatchResults) -> None:
        self.setup = setup
        self.cutter = cutter
        self.results = results
        self.second_check = SecondCheck(setup.options.partition.check)

    def run(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        batch: Any,
        is_first: bool,
        begin: Callable[[int], None],
        continues: bool,
    ) -> Any:
        """What the step returns for the whole batch, on every rank; its gradients are in the stash. Collective.

        Args:
            partitioned: the module.
            step: the training step.
            batch: the same on all ranks of the pipeline.
            is_first: whether the module was partitioned with this batch.
            begin: prepares gradients for a number of micro-batches.
            continues: whether its gradients are added to those of an earlier batch, so that it cannot be run again.

        Raises:
            SplitError: on every rank: no stages fit what the step does now.
        """
        # Cut the batch and find its path; run it; take its gradients out of Lightning's way; put its results together.
        trials = PathTrials(partitioned, self.cutter, step, batch)
        found = trials.find(is_first)
        microbatches, _ = found
        if not continues:
            self.second_check.run(partitioned, step, microbatches[0])
        partitioned.separate_draws()
        # A batch that left its path is dropped and run again. That cannot be done where its gradients are added to
        # those of an earlier batch, or averaged over replicas.
        drop = None
        if not continues and partitioned.replicas is None:
            drop = partitioned.stash.drop
        find_again = functools.partial(trials.find, False)
        outputs = run_batch(partitioned, step, found, find_again, begin, drop)
        partitioned.stash.stash()
        partitioned.buffers.trained = True
        trials.look_behind(microbatches)

        results = self.results.combine(partitioned, step, outputs, batch, microbatches)
        if isinstance(results, str):
            raise ValueError(
                f"What `{step.hook}` gives for micro-batches cannot be put together: {results}. Use num_microbatches=1."
            )
        output = self.results.apply(partitioned, results)
        loss_of(output, step.hook, detached=True)  # of one row each, losses of rows look like those of micro-batches
        return output


def run_batch(
    partitioned: PartitionedModule,
    step: LightningStep,
    found: Attempt,
    find: Callable[[], Attempt],
    begin: Callable[[int], None] = lambda _: None,
    drop: Callable[[], None] | None = lambda: None,
) -> list[Any]:
    """Run all micro-batches; again where one of them does something new behind its last module. Collective.

    Args:
        partitioned: the module.
        step: the user's.
        found: the batch's micro-batches, and their paths.
        find: finds them again.
        begin: called with their number before each attempt.
        drop: called behind one that failed; None where that cannot be undone.

    Returns:
        What the step returned for each, on the rank where it ends; else an empty list.

    Raises:
        SplitError: on every rank: the step cannot be pipelined. Nothing of it is left.
        LeftCourseError: on every rank, without ``drop``.
    """
    while True:
        microbatches, paths = found
        begin(len(microbatches))
        try:
            # run all micro-batches -> everybody votes -> all as expected: go on
            #                                         -> one left its path: undo, learn the new path, run again
            # All ranks raise or none does, so that all come to the next attempt together.
            with _undone_if_left(partitioned.setup, paths):
                outputs = _run_rounds(partitioned, step, microbatches, paths)
                if not partitioned.take_tails(step, drop is not None):
                    raise NewTailError
            partitioned.go_on(step)
            return outputs
        except NewTailError:
            assert drop is not None
            step.forget()
            step.offset = 0
            drop()
            found = find()  # compares the weights again
        except LeftCourseError as error:
            step.forget()
            partitioned.runtime.writes.put_back()
            failures = {step.offset + index: text for index, text in error.failures.items()}
            step.offset = 0
            if drop is None:
                with_cure = {index: f"{text} {FROM_CHECKPOINT}" for index, text in failures.items()}
                raise LeftCourseError(with_cure) from None
            drop()
            partitioned.learn(step, microbatches, paths, failures)
            found = find()


@contextmanager
def _undone_if_left(setup: RunSetup, paths: Sequence[TracedPath]) -> Iterator[None]:
    """Where a path is left inside, put back torch's random numbers, and buffers that the step changes."""
    device = setup.device
    graphs = {id(staged): staged.graph for staged, _ in paths}  # of all micro-batches, each once
    names: set[str] = set()
    for graph in graphs.values():
        for node in graph.nodes:
            names.update(node.buffers)
    buffers = []
    if names:
        for name, buffer in setup.module.named_buffers():
            if name in names:
                buffers.append((buffer, buffer.detach().clone()))
    states = generator_states(device)
    try:
        yield
    except LeftCourseError:
        set_generator_states(states, device)
        for buffer, value in buffers:
            buffer.detach().copy_(value)
        raise


def _run_rounds(
    partitioned: PartitionedModule,
    step: LightningStep,
    microbatches: Sequence[MicroBatch],
    paths: Sequence[TracedPath],
) -> list[Any]:
    """The micro-batches of a batch once, in as many rounds as ``active_microbatches`` asks for. Collective.

    Args:
        partitioned: the module.
        step: the user's.
        microbatches: of the batch.
        paths: of each.

    Returns:
        What the step returned for each, on the rank where it ends; else an empty list.
    """
    size = partitioned.setup.options.partition.active_microbatches or len(microbatches)
    watched = partitioned.watched_numbers(step, microbatches)
    outputs: list[Any] = []
    with _casting_once(partitioned, step, paths):
        for begin in range(0, len(microbatches), size):
            now = slice(begin, begin + size)
            step.offset = begin
            outputs += partitioned.runtime.run(paths[now], step, microbatches[now], step.trains, looks=watched)
    return outputs


def _casting_once(
    partitioned: PartitionedModule,
    step: LightningStep,
    paths: Sequence[TracedPath],
) -> AbstractContextManager[None]:
    """Mixed precision casts each weight once for all micro-batches, where that makes no difference."""
    setup = partitioned.setup
    kinds = {staged.graph.cast_type for staged, _ in paths}
    if not step.trains or setup.options.activation_checkpointing or None in kinds:
        return nullcontext()
    with setup.step_context("training_step"):
        step.keeps_casts = may_keep_casts(kinds, setup.device)
    if not step.keeps_casts:
        return nullcontext()
    return kept_casts(partitioned.stash.parameters.values(), lambda: setup.step_context(step.hook))
