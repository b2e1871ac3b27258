"""Validation, test and prediction steps of a partitioned module.

The first batch of a step shows how it can be run: as a pipeline of micro-batches, as one micro-batch where parts of a
batch do not make up what the step shows for it, or in *lockstep* where it cannot be cut into stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_smddp.bridge.batch_cutting import BatchCutter, rows_by_results
from lightning_smddp.bridge.batch_results import BatchResults
from lightning_smddp.bridge.logged_values import disagree
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.result_trials import Findings, PartFailedError
from lightning_smddp.bridge.run_setup import RunSetup, warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.bridge.step_results import Observed
from lightning_smddp.bridge.training import Attempt, run_batch
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.runtime.departures import LeftCourseError
from lightning_smddp.pipeline.runtime.staged_step import TracedPath
from lightning_smddp.wire.broadcast import broadcast_json

_MOST_TRIALS = 16  # of one step, because it did something new


class Evaluation:
    """Runs evaluation steps, forward only, and knows of each in which way it runs.

    Args:
        setup: of the run.
        cutter: cuts batches into micro-batches.
        results: combines what micro-batches give.
    """

    def __init__(self, setup: RunSetup, cutter: BatchCutter, results: BatchResults) -> None:
        self.setup = setup
        self.cutter = cutter
        self.results = results
        self._in_lockstep: set[Any] = set()  # all sets and dicts: by key of the step
        self._traced: set[Any] = set()  # those that ran as pipelines
        self._found: dict[Any, Findings] = {}  # by a trial, of those that were tried
        self._new_trials: Counter[Any] = Counter()  # because a step did something new

    def run(self, partitioned: PartitionedModule, step: LightningStep, batch: Any) -> Any:
        """What the step returns for the whole batch, on every rank. Collective over the pipeline."""
        if self.is_in_lockstep(step):
            return self._run_in_lockstep(partitioned, step, batch)
        self._find_rows(partitioned, step, batch)
        microbatches = self._cut(partitioned, step, batch)
        paths = self._find_paths(partitioned, step, microbatches)
        # Whatever has just been found out, the step then starts anew, in the way that it has from here on.
        if paths is None or self._learns(partitioned, step, batch, microbatches):
            return self.run(partitioned, step, batch)
        # Values of the first batch may not have told how logs are put together, as several rules explained them. Where
        # these differ now, a trial of this batch decides, and the batch itself is run as a whole.
        try:
            outputs = self._attempt(partitioned, step, batch, (microbatches, paths))
            if self._is_told_more(step):
                step.forget()
                self._try_on_parts(partitioned, step, self.cutter.together(batch, microbatches))
                microbatches = [self.cutter.splitter.whole(batch)]  # which is right in any case
                paths = partitioned.paths(step, microbatches)
                outputs = self._attempt(partitioned, step, batch, (microbatches, paths))
        except (SplitError, LeftCourseError) as error:  # on every rank
            self.keep_in_lockstep(step, error)
            return self.run(partitioned, step, batch)
        results = self.results.combine(partitioned, step, outputs, batch, microbatches)
        if isinstance(results, str):
            self.cutter.refuse_parts(step, results)
            return self.run(partitioned, step, batch)
        return self.results.apply(partitioned, results)

    def _cut(self, partitioned: PartitionedModule, step: LightningStep, batch: Any) -> list[MicroBatch]:
        parts = self.cutter.cut(batch, step, can_try=False)
        return self.cutter.weighted(partitioned.weighed.weighting, parts)

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
                self.cutter.refuse_parts(step, f"it fails on a part ({own_error(error)!r})")
            else:
                self.keep_in_lockstep(step, own_error(error))
            return None
        self._traced.add(step.key)
        return paths

    def _attempt(self, partitioned: PartitionedModule, step: LightningStep, batch: Any, found: Attempt) -> list[Any]:
        def find_again() -> Attempt:
            """What it does now, it has never done: other parts of the batch may be right."""
            self._try_again(partitioned, step, batch, found[0])
            microbatches = self._cut(partitioned, step, batch)
            return microbatches, partitioned.paths(step, microbatches)

        partitioned.separate_draws()
        return run_batch(partitioned, step, found, find_again)

    # ---- one micro-batch for each batch ----

    def _find_rows(self, partitioned: PartitionedModule, step: LightningStep, batch: Any) -> None:
        """Try out whether the rows of a step's batches come first, if nothing says so. Collective."""
        whole = self.cutter.doubtful(batch, step)
        if whole is None:
            return

        def run(part: MicroBatch) -> Observed | None:
            return partitioned.try_out(step, [part])

        try:
            found = rows_by_results(run, whole, self.setup)
        except PartFailedError:
            found = False
        self.cutter.learn(step, found)

    def _learns(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        batch: Any,
        microbatches: Sequence[MicroBatch],
    ) -> bool:
        """Whether a trial has shown that batches have to be cut otherwise, or it was the first one. Collective."""
        if self.setup.options.partition.check and step.key not in self._found:
            rows = self.cutter.pair(batch, microbatches)
            if rows is not None:
                self._try_on_parts(partitioned, step, rows)
                partitioned.take_unforeseen(step)
                return True
        self._try_again(partitioned, step, batch, microbatches)
        return self.cutter.is_whole(step) and len(microbatches) > 1

    def _try_again(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        batch: Any,
        microbatches: Sequence[MicroBatch],
    ) -> None:
        """Try ``step`` on a ``batch`` that was cut so, if it did there what it never did. Collective."""
        if not partitioned.take_unforeseen(step):
            return
        if not self.setup.options.partition.check or self.cutter.is_whole(step):
            return
        rows = self.cutter.pair(batch, microbatches)
        if rows is None:
            return
        self._new_trials[step.key] += 1
        if self._new_trials[step.key] > _MOST_TRIALS:
            self.cutter.refuse_parts(step, "it does something else in too many batches")
            return
        self._try_on_parts(partitioned, step, rows)
        partitioned.take_unforeseen(step)  # of the trial

    def _try_on_parts(self, partitioned: PartitionedModule, step: LightningStep, rows: MicroBatch) -> None:
        """Compare what ``step`` shows for ``rows`` with what two parts of them make up. Collective."""
        known = self._found.setdefault(step.key, Findings())
        try:
            found = partitioned.try_on_parts(step, rows, known)
        except PartFailedError as error:
            self.cutter.refuse_parts(step, f"it fails on a part ({error})")
            return
        if found is None:
            return
        self._found[step.key] = found
        if found.differences:
            self.cutter.refuse_parts(step, f"{found.text()}. torchmetrics objects see whole batches")

    def _is_told_more(self, step: LightningStep) -> bool:
        """Whether values that micro-batches have just logged end a doubt. Collective where there is one."""
        found = self._found.get(step.key)
        if found is None or not found.doubts or self.cutter.is_whole(step):
            return False
        # Only the rank where the step ends has logged values, and what it finds holds for all.
        told = False
        for name, rules in found.doubts.items():
            told = told or disagree(rules, step.capture.values_logged(name))
        return bool(broadcast_json(told, self.setup.groups.pipeline, self.setup.device, self.setup.last_rank))

    # ---- lockstep: all ranks run the step, and each operation is done where its values are ----

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
        whole = self.cutter.splitter.whole(batch)
        microbatch = MicroBatch(whole.value, whole.size, 1.0)
        with partitioned.inside_view():
            try:
                with step.capture.left.unwatched(), step.around(None, 0, microbatch, keep=True):
                    output = step(microbatch)
                results = step.capture.results([output], partitioned.view.plain)
            finally:
                step.forget()
        return results.apply(self.setup.module, self.results.metrics)
