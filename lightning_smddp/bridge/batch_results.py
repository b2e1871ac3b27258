"""What a step shows for a batch, made of what it gave for micro-batches, on every rank of the pipeline.

An integer in an attribute may count rows, hits, or calls of the step. The trial at the start knows those that have
moved then. A counter of rare events moves later, maybe by one in each of some micro-batches: what it comes to for the
batch is one if it counts calls, and their sum if it counts rows. So the batch is run for nothing once more, at once and
in its micro-batches, forward only; then it shows what the integer counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_smddp.bridge.attribute_counts import UNKNOWN
from lightning_smddp.bridge.batch_cutting import BatchCutter
from lightning_smddp.bridge.capture import StepCapture
from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.run_setup import RunSetup, warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.bridge.step_attributes import AttrPath
from lightning_smddp.bridge.step_results import StepResults, broadcast_results
from lightning_smddp.pipeline.capture.constant_random import without_chance
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UncombinableError
from lightning_smddp.wire.broadcast import HeaderCache
from lightning_smddp.wire.gather import gather_json


class BatchResults:
    """Combines what the micro-batches of a batch gave, and applies it to the module.

    Args:
        setup: of the run.
        capture: kept what the step did for each micro-batch.
        metrics: is told which metrics a batch has changed.
        cutter: is told which steps have to run on whole batches.
    """

    def __init__(self, setup: RunSetup, capture: StepCapture, metrics: PipelineMetrics, cutter: BatchCutter) -> None:
        self.setup = setup
        self.capture = capture
        self.metrics = metrics
        self.cutter = cutter
        self._headers: dict[Any, HeaderCache] = {}  # by step: of the messages with its results

    def combine(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        outputs: list[Any],
        batch: Any,
        microbatches: Sequence[MicroBatch],
    ) -> StepResults | str:
        """What one process would have shown, on every rank; or why nothing stands for all. Collective.

        Args:
            partitioned: the module.
            step: that has run.
            outputs: what it returned for each micro-batch, on the rank where it ends.
            batch: as Lightning gave it.
            microbatches: that it was cut into.
        """
        results = self._shared(step, outputs)
        if isinstance(results, str) and results.startswith(UNKNOWN):
            self._settle_counts(partitioned, step, batch, microbatches)
            results = self._shared(step, outputs)
        return results

    def apply(self, partitioned: PartitionedModule, results: StepResults) -> Any:
        """Let ranks and hooks have what the step shows, and return what it returns. Collective."""
        output = results.apply(self.setup.module, self.metrics)
        self.capture.left.share(partitioned.view)
        return output

    def _shared(self, step: LightningStep, outputs: list[Any]) -> StepResults | str:
        """Combined on the rank where the step ends, and sent to the others. Collective."""
        setup = self.setup
        doubt = self.capture.left.find_out(setup.num_stages - 1, *setup.groups.host)
        if doubt is not None:
            return doubt
        results: StepResults | str | None = None
        if setup.ends_here:
            try:
                self.capture.require_known_counts(step.key)
                # Metrics that see the whole batch compute as they would in the step.
                with setup.step_context(step.hook):
                    results = self.capture.results(outputs, key=step.key)
            except UncombinableError as error:
                results = str(error)
        return broadcast_results(
            results,
            setup.groups.pipeline,
            setup.last_rank,
            setup.device,
            cache=self._headers.setdefault(step.key, HeaderCache()),
            like=self.capture.examples.get(step.key),
            host=setup.groups.host,
        )

    def _settle_counts(
        self,
        partitioned: PartitionedModule,
        step: LightningStep,
        batch: Any,
        microbatches: Sequence[MicroBatch],
    ) -> None:
        """Find out what integers count that this batch has moved. Collective.

        Called where ``StepCapture.require_known_counts`` has raised on the rank where ``step`` ends, or ``LeftBehind``
        has found doubts on any. Where an integer counts neither rows nor calls, batches are one micro-batch from here
        on, but for a number that the user gave.
        """
        capture = step.capture
        # The batch at once comes first, then its micro-batches: what each sets attributes of the LightningModule to,
        # on the rank where the step ends, and those of other owners, on all ranks.
        runs, left = [], []
        together = self.cutter.together(batch, microbatches)
        with capture.aside():
            for rows in (together, *microbatches):
                with capture.left.recorded() as found:
                    runs.append(_attributes_after(partitioned, step.unscaled(), rows))
                left.append(found)
        partitioned.take_unforeseen(step)  # of the trials
        local = capture.left.learn_counts(left[0], left[1:])
        if self.setup.ends_here:
            local = capture.learn_counts(runs[0], runs[1:]) or local
        gathered = gather_json(local, self.setup.groups.pipeline, self.setup.device)
        problems = [problem for problem in gathered if problem is not None]
        if not problems:
            return
        if self.setup.options.num_microbatches is None:
            self.cutter.keep_whole(step)
        warn_on_first_rank(f"At {step.batch_name()} {problems[-1]} {self.cutter.consequence()}")


def _attributes_after(partitioned: PartitionedModule, step: LightningStep, rows: MicroBatch) -> dict[AttrPath, Any]:
    """What the step sets attributes to for ``rows``, on the rank where it ends. Collective over the pipeline."""
    with without_chance(partitioned.setup.device), torch.no_grad():
        seen = partitioned.try_out(step, [rows])
    if seen is None:
        return {}
    return {(name,): value for name, value in seen.results.attributes.items()}
