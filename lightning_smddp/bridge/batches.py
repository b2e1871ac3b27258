"""One batch of a partitioned module: a training step forward and backward, any other step forward.

The first batch of an evaluation step shows how it can be run: as a pipeline of micro-batches, as one micro-batch where
those of parts cannot be put together, or in *lockstep* where it cannot be cut into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_smddp.bridge.micro_batches import MicroBatcher
from lightning_smddp.bridge.module_states import RunSetup, warn_on_first_rank
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_record import StepRecorder, StepResults
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.batch_sync import BatchSync
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UncombinableError
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.runtime.casts import kept_casts, may_keep_casts
from lightning_smddp.pipeline.runtime.engine import StepRun
from lightning_smddp.pipeline.runtime.remote import ReplayError
from lightning_smddp.pipeline.runtime.stage_program import TracedPath
from lightning_smddp.pipeline.runtime.step_exchange import StepExchange

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
        self.share = 1.0
        self._in_lockstep: set[Any] = set()  # keys of steps
        self._traced: set[Any] = set()  # those that ran as pipelines

    # ---- training ----

    def train(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        batch: Any,
        begin: Callable[[int], None],
    ) -> Any:
        """What the step returns for the whole batch, on every rank; its gradients are in the stash. Collective.

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
        run = self._run(partitioned, step, microbatches, paths)
        try:
            results = self._results(partitioned, step, run, _share(microbatches, run.outputs))
        except ReplayError as error:
            raise ReplayError(f"{error} {FROM_CHECKPOINT}") from error
        partitioned.stash.stash()
        partitioned.buffers.trained = True
        if isinstance(results, str):
            raise ValueError(
                f"What `{step.hook}` gives for micro-batches cannot be put together: {results}. Use num_microbatches=1."
            )
        output = self.recorder.apply(results)
        if output is None:
            return None
        loss_of(output, step.hook, detached=True)  # of one row each, losses of rows look like those of micro-batches
        return output

    def _run(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        microbatches: Sequence[MicroBatch],
        paths: Sequence[TracedPath],
    ) -> StepRun:
        """All micro-batches under the schedule. Collective."""
        with self._casting_once(partitioned, step, paths):
            return partitioned.runtime.run(paths, step, microbatches, step.trains)

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
        # Whatever has just been found out, the step then starts anew, in the way that it has from here on.
        if self.is_in_lockstep(step):
            return self._run_in_lockstep(partitioned, step, batch)
        microbatches = self.batcher.split(batch, step)
        paths = self._find_paths(partitioned, step, microbatches)
        if paths is None:
            return self.evaluate(partitioned, step, batch)
        run = self._run(partitioned, step, microbatches, paths)
        try:
            results = self._results(partitioned, step, run)
        except ReplayError as error:  # on every rank
            self.keep_in_lockstep(step, error)
            return self.evaluate(partitioned, step, batch)
        if isinstance(results, str):
            step.forget()
            self.batcher.keep_whole(step, f"what it returns for micro-batches cannot be put together ({results})")
            return self.evaluate(partitioned, step, batch)
        return self.recorder.apply(results)

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
        self, partitioned: PartitionedModule, step: LightningStep, run: StepRun, share: float = 1.0
    ) -> StepResults | str:
        """Combined on the rank where the step ends, and sent to the others; or why they cannot be. Collective.

        Raises:
            Exception: on every rank, where the step has failed on one; see ``StepExchange.run``.
        """
        results: StepResults | str | None = None
        if self.setup.ends_here and not run.failures:
            try:
                results = self.recorder.results(run.outputs, self.setup.num_stages - 1, step.trains)
            except UncombinableError as error:
                results = str(error)
        if step.key not in self._exchanges:
            self._exchanges[step.key] = partitioned.runtime.exchange()
        try:
            shared: StepResults | str
            shared, self.share = self._exchanges[step.key].run((results, share), self.sync.digest(), run.failures)
        except Exception:
            step.forget()
            raise
        return shared


def _share(microbatches: Sequence[MicroBatch], outputs: Sequence[Any]) -> float:
    """Of their weights, those of micro-batches for which a training step returned something; 1 where losses are added.

    On the rank where the step ends; elsewhere ``outputs`` is empty.
    """
    if all(output is not None for output in outputs) or all(part.weight == 1 for part in microbatches):
        return 1.0
    return sum(part.weight for part, output in zip(microbatches, outputs, strict=True) if output is not None)
