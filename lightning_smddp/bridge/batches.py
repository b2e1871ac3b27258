"""One batch of a partitioned module: cut into micro-batches, run, and put together.

A batch is cut by the user's functions, else along dimension 0; where that may not be the rows, it is one micro-batch,
said once: nothing is tried out. A training step runs forward and backward, any other step forward. The first batch of
an evaluation step shows how it can be run: as a pipeline of micro-batches, as one micro-batch where those of parts
cannot be put together, or in *lockstep* where it cannot be cut into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_smddp.bridge.partitioned_module import PartitionedModule, RunSetup, warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_record import StepRecorder, StepResults
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.batch_sync import BatchSync
from lightning_smddp.pipeline.partition.loss_weights import LossWeight, given_weight
from lightning_smddp.pipeline.partition.microbatches import (
    MicroBatch,
    Splitter,
    UnclearBatchError,
    UncombinableError,
    has_time_first,
    looks_at_other_rows,
)
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.runtime.casts import kept_casts, may_keep_casts
from lightning_smddp.pipeline.runtime.remote import ReplayError
from lightning_smddp.pipeline.runtime.stage_program import TracedPath
from lightning_smddp.pipeline.runtime.step_exchange import StepExchange
from lightning_smddp.planner.schedules import auto_num_microbatches
from lightning_smddp.wire.pytree import leaves

BATCH_NORM_ROWS = 16  # of a micro-batch at least with "auto", where BatchNorm trains
_CURE = (
    "Give the module a method `split_batch(batch, num_microbatches)` that returns a list of batches (or of pairs of a "
    "batch and its number of rows), or the strategy PartitionOptions(split_batch=...) or (batch_size_fn=...); "
    "num_microbatches=1 says that one micro-batch is what you want."
)


class MicroBatcher:
    """Cuts the batches of one run into micro-batches, with their weights.

    Where the first dimension may not be that of the rows, a batch is one micro-batch, said once: nothing is tried out.

    Args:
        setup: of the run; the module's method ``split_batch`` is used if it has one.
        sync: knows the present batch.

    Attributes:
        chosen: the weights that the trial of ``loss_weight="auto"`` has found; None before it.
        count: in how many micro-batches the last batch ran.
    """

    def __init__(self, setup: RunSetup, sync: BatchSync) -> None:
        self.setup = setup
        self.options = setup.options
        self.splitter = splitter_for(setup.module, self.options.partition)
        self.chosen: LossWeight | None = None
        self.count = 1
        self._sync = sync
        self._whole: set[Any] = set()  # keys of steps whose batches are one micro-batch each
        self._said: set[str] = set()

    def split(self, batch: Any, step: LightningStep) -> list[MicroBatch]:
        """The micro-batches of a batch for ``step``, weighted. All ranks of the pipeline have the same batch."""
        parts = self._cut(batch, step)
        self.count = len(parts)
        if len(parts) == 1:
            return parts
        on_host = self._sync.on_host if self.splitter.split_batch is None else None  # cut by rows, as its parts are
        return self.loss_weight(batch, step).apply(parts, on_host, self._sync.values_of)

    def loss_weight(self, batch: Any, step: LightningStep) -> LossWeight:
        """How micro-batches of ``step`` count: as the user said, as the trial has found, else by rows.

        Raises:
            ValueError: a training batch has not what the user has named. Others count by rows then.
        """
        try:
            given = given_weight(self.options.loss_weight, batch)
        except ValueError:
            if step.trains:
                raise
            return LossWeight()
        return given or self.chosen or LossWeight()

    def keep_whole(self, step: LightningStep, why: str) -> None:
        """From now on each batch of ``step`` is one micro-batch, said once. On all ranks of the pipeline."""
        step.forget()
        self._whole.add(step.key)
        warn_on_first_rank(f"`{step.hook}` runs each batch as one micro-batch, without overlap of stages: {why}.")

    def _cut(self, batch: Any, step: LightningStep) -> list[MicroBatch]:
        setup = self.setup
        if step.key in self._whole or self.options.num_microbatches == 1:
            return [self.splitter.whole(batch)]
        sizes = loader_sizes(getattr(setup.module, "trainer", None), step.hook, step.arguments)
        try:
            rows = self.splitter.rows(batch, sizes)
            count = self.options.num_microbatches
            if count is None:
                ranks = setup.groups.pipeline.size()
                count = count_for(self.options.schedule, ranks, setup.num_stages, rows, setup.module)
            return self.splitter.cut(batch, count, rows)
        except UnclearBatchError as error:
            why = str(error).partition(";")[0]
            reason = why.partition("(")[0]  # the numbers in parentheses differ from batch to batch
            if reason not in self._said:
                self._said.add(reason)
                warn_on_first_rank(f"smddp_pipeline runs batches as one micro-batch, without overlap: {why}. {_CURE}")
            return [self.splitter.whole(batch)]


def splitter_for(module: Any, options: Any) -> Splitter:
    """Cuts batches of ``module`` by the user's functions where there are some."""
    hook = options.split_batch or getattr(module, "split_batch", None)
    return Splitter(options.batch_size_fn, hook if callable(hook) else None, has_time_first(module))


def count_for(schedule: Any, ranks: int, num_stages: int, rows: int, module: Any) -> int:
    """How many micro-batches ``"auto"`` makes of ``rows`` for a pipeline of ``ranks`` with ``num_stages``."""
    has_batch_norm = bool(looks_at_other_rows(module))
    least = BATCH_NORM_ROWS if has_batch_norm else 1

    def allowed(count: int) -> bool:
        return schedule.microbatches_ok(count, ranks, num_stages) and rows // count >= least

    if any(allowed(count) for count in range(1, rows + 1)):
        return auto_num_microbatches(rows, ranks, allowed)
    return max(1, rows // least)


_LOADERS = {
    "training_step": "train_dataloader",
    "validation_step": "val_dataloaders",
    "test_step": "test_dataloaders",
    "predict_step": "predict_dataloaders",
}


def loader_sizes(trainer: Any, hook: str, arguments: Sequence[Any]) -> tuple[int, ...]:
    """Sizes that a batch of a step's loader can have, the usual ones first; empty if the loader does not say.

    Args:
        trainer: whose loaders.
        hook: name of the step.
        arguments: of the step, besides the batch.
    """
    # A training batch may come of all loaders at once; an evaluation batch is of one, and the step is given its index.
    loaders = getattr(trainer, _LOADERS[hook], None)
    every = leaves(getattr(loaders, "iterables", loaders))  # a CombinedLoader has them there
    index = arguments[1] if len(arguments) > 1 else None  # evaluation steps: (batch, batch_idx, dataloader_idx)
    if hook != "training_step" and isinstance(index, int):
        every = every[index : index + 1]
    sizes = [_sizes(loader) for loader in every]
    return sum(sizes, ()) if all(sizes) else ()


def _sizes(loader: Any) -> tuple[int, ...]:
    """The usual size, and that of the last batch if it is another."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if not isinstance(size, int):
        return ()
    try:
        rest = len(sampler.sampler) % size  # type: ignore[union-attr]
    except (AttributeError, TypeError):  # a stream, or a sampler without length
        return (size,)
    return (size, rest) if rest else (size,)


FROM_CHECKPOINT = (
    "When the step was traced it took another path. Give `fit` the last checkpoint as `ckpt_path`: the step is "
    "traced again then, as it is at that time."
)


class Batches:
    """Runs the batches of a run, and knows of each evaluation step in which way it runs.

    Args:
        setup: of the run.
        batcher: cuts batches into micro-batches.
        recorder: keeps what the step does for each micro-batch.
        sync: knows the present batch.
    """

    def __init__(self, setup: RunSetup, batcher: MicroBatcher, recorder: StepRecorder, sync: BatchSync) -> None:
        self.setup = setup
        self.sync = sync
        self.batcher = batcher
        self.recorder = recorder
        self._exchanges: dict[Any, StepExchange] = {}  # by key of the step
        self._in_lockstep: set[Any] = set()  # keys of steps
        self._traced: set[Any] = set()  # those that ran as pipelines

    # ---- training ----

    def train(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        batch: Any,
        begin: Callable[[int], None],
    ) -> StepResults:
        """What the step does with the whole batch, on every rank; its gradients are in the stash. Collective.

        Args:
            partitioned: the module.
            step: the training step.
            batch: the same on all ranks of the pipeline.
            begin: prepares gradients for a number of micro-batches.

        Raises:
            SplitError: on every rank: no stages fit what the step does now.
            ReplayError: on every rank: it did something else on a stage than a dry run had shown.
            ValueError: on every rank: what it returns for micro-batches cannot be put together.
        """
        microbatches = self.batcher.split(batch, step)
        paths = partitioned.paths(step, microbatches)
        begin(len(microbatches))
        try:
            results = self._results(partitioned, step, microbatches, paths)
        except ReplayError as error:
            raise ReplayError(f"{error} {FROM_CHECKPOINT}") from error
        partitioned.stash.stash()
        partitioned.buffers.trained = True
        if isinstance(results, str):
            raise ValueError(
                f"What `{step.hook}` gives for micro-batches cannot be put together: {results}. Use num_microbatches=1."
            )
        self.recorder.apply(results)
        if results.output is not None:  # of one row each, losses of rows look like those of micro-batches
            loss_of(results.output, step.hook, detached=True)
        return results

    def _casting_once(
        self, partitioned: PartitionedModule, step: LightningStep, paths: Sequence[TracedPath]
    ) -> AbstractContextManager[None]:
        """Mixed precision casts each weight once for all micro-batches, where that makes no difference."""
        setup = self.setup
        kinds = {staged.graph.cast_type for staged, _ in paths}
        if not step.trains or setup.options.activation_checkpointing or None in kinds:
            return nullcontext()
        with setup.step_context("training_step"):
            step.keeps_casts = may_keep_casts(kinds, setup.device)
        if not step.keeps_casts:
            return nullcontext()
        return kept_casts(partitioned.stash.parameters.values(), lambda: setup.step_context(step.hook))

    # ---- evaluation ----

    def evaluate(self, partitioned: PartitionedModule, step: LightningStep, batch: Any) -> Any:
        """What the step returns for the whole batch, on every rank. Collective over the pipeline."""
        if self.is_in_lockstep(step):
            return self._run_in_lockstep(partitioned, step, batch)
        microbatches = self.batcher.split(batch, step)
        try:
            paths = self._find_paths(partitioned, step, microbatches)
            results = None if paths is None else self._results(partitioned, step, microbatches, paths)
        except ReplayError as error:  # on every rank
            self.keep_in_lockstep(step, error)
            results = None
        if isinstance(results, str):
            step.forget()
            self.batcher.keep_whole(step, f"what it returns for micro-batches cannot be put together ({results})")
        if isinstance(results, StepResults):
            return self.recorder.apply(results)
        # Whatever has just been found out, the step starts anew, in the way that it has from here on.
        return self.evaluate(partitioned, step, batch)

    def _find_paths(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        microbatches: Sequence[MicroBatch],
    ) -> list[TracedPath] | None:
        """The path of each micro-batch; None where the step has to run in another way from here on. Collective."""
        is_new = step.key not in self._traced
        try:
            paths = partitioned.paths(step, microbatches)
        except Exception as error:
            # A first trace fails on all ranks alike, also by an error of the user's own, which then comes again.
            # Later an error of one stage alone has to end the run: the others wait for it.
            is_of_user = isinstance(error, StepFailedError) or not isinstance(error, SplitError)
            if is_of_user and not is_new:
                raise own_error(error) from None
            if is_of_user and len(microbatches) > 1:
                self.batcher.keep_whole(step, f"it fails on a part of a batch ({own_error(error)!r})")
            else:
                self.keep_in_lockstep(step, own_error(error))
            return None
        self._traced.add(step.key)
        return paths

    def is_in_lockstep(self, step: LightningStep) -> bool:
        """Whether ``step`` cannot be cut into stages."""
        return step.key in self._in_lockstep

    def keep_in_lockstep(self, step: LightningStep, error: BaseException) -> None:
        """From now on ``step`` runs so, as it fails as a pipeline with ``error`` on every rank of it.

        Raises:
            BaseException: ``error``, if it is about another rank.
        """
        if isinstance(error, RankFailedError):
            raise error
        self._in_lockstep.add(step.key)
        warn_on_first_rank(
            f"`{step.hook}` runs in lockstep: all ranks run it on the whole batch, and each operation is done by "
            "the rank that has the parameters. That is right, but slower than one process. It cannot be pipelined: "
            f"{error}"
        )

    def _run_in_lockstep(self, partitioned: PartitionedModule, step: LightningStep, batch: Any) -> Any:
        """The step as it is, on the whole batch, within the view of the whole module. Collective.

        A step that generates text calls its modules as often as the text is long: there are no stages of it.
        """
        whole = self.batcher.splitter.whole(batch)
        self.batcher.count = 1
        microbatch = MicroBatch(whole.value, whole.size, 1.0)
        with partitioned.inside_view(waits=False):
            try:
                with self.recorder.microbatch(0, 0, whole.size, None, keep=True, plain=partitioned.view.plain):
                    output = step(microbatch)
                results = self.recorder.results([output], plain=partitioned.view.plain)
            except BaseException:
                step.forget()
                raise
        return self.recorder.apply(results)

    # ---- results ----

    def _results(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        microbatches: Sequence[MicroBatch],
        paths: Sequence[TracedPath],
    ) -> StepResults | str:
        """Run all micro-batches under the schedule; what they make up, or why they cannot be put together. Collective.

        It is combined on the rank where the step ends, and sent to the others.

        Raises:
            Exception: on every rank, where the step has failed on one; see ``StepExchange.run``.
        """
        with self._casting_once(partitioned, step, paths):
            run = partitioned.runtime.run(paths, step, microbatches, step.trains)
        results: StepResults | str | None = None
        if self.setup.ends_here and not run.failures:
            try:
                results = self.recorder.results(run.outputs, self.setup.num_stages - 1, step.trains)
            except UncombinableError as error:
                results = str(error)
        if step.key not in self._exchanges:
            self._exchanges[step.key] = partitioned.runtime.exchange()
        try:
            shared: StepResults | str = self._exchanges[step.key].run(results, self.sync.digest(), run.failures)
        except Exception:
            step.forget()
            raise
        return shared
