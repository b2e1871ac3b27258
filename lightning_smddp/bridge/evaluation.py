"""Validation, test and prediction steps: their trials, and the steps that cannot be pipelined."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.bridge.batch_cutting import BatchCutter
from lightning_smddp.bridge.capture import StepCapture
from lightning_smddp.bridge.log_rules import disagree
from lightning_smddp.bridge.partitioned_module import PartFailedError, PartitionedModule
from lightning_smddp.bridge.result_trials import Findings, tolerance_of, try_results
from lightning_smddp.bridge.row_trials import rows_by_results
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.bridge.step_results import KeptState, Observed, StepResults
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.pipeline.partition.mesh import Groups
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.view.global_view import GlobalView
from lightning_smddp.wire.broadcast import broadcast_json, broadcast_structure

_MOST_TIMES = 16


class EvaluationTrials:
    """Finds out by its first batch how what a step shows for micro-batches makes up what it shows for a batch.

    Args:
        capture: is taught what is found.
        cutter: is told which steps have to run on whole batches.
        groups: this rank's place.
        last_rank: of the pipeline, where steps end.
        device: of this rank.
    """

    def __init__(
        self, capture: StepCapture, cutter: BatchCutter, groups: Groups, last_rank: int, device: torch.device
    ) -> None:
        self.capture, self.cutter, self.groups, self.last_rank, self.device = (
            capture, cutter, groups, last_rank, device
        )  # fmt: skip
        self._found: dict[Any, Findings] = {}  # by step that was tried
        self._times: Counter[Any] = Counter()  # that it was tried again

    def has(self, step: LightningStep) -> bool:
        """Whether ``step`` was tried."""
        return step.key in self._found

    def find_rows(self, divided: PartitionedModule, step: LightningStep, whole: MicroBatch) -> None:
        """Try out whether the rows of a step's batches come first. Collective over the pipeline."""

        def run(part: MicroBatch) -> Observed | None:
            return divided.try_out(step, [part])

        try:
            found = rows_by_results(run, whole, self.groups, self.last_rank, self.device)
        except PartFailedError:
            found = False
        self.cutter.learn(step, found)

    def run(self, divided: PartitionedModule, step: LightningStep, rows: MicroBatch) -> None:
        """Try ``step`` on ``rows`` and on two parts of them. Collective over the pipeline."""
        parts = divided.weighting.apply(rows.split(2))
        before = self._found.setdefault(step.key, Findings())
        if len(parts) < 2:
            return
        tolerance = tolerance_of(divided.is_exact(), self.device)
        by_rows = divided.weighting.kind == "rows"

        def run(some: Sequence[MicroBatch], state: KeptState | None) -> Observed | None:
            try:
                return divided.try_out(step, some, state)
            except PartFailedError:  # on all ranks
                if state is None:
                    raise
                return None

        try:
            found = try_results(run, self._share, rows, parts, self.capture, step.key, tolerance, by_rows)
        except PartFailedError as error:
            self.keep_whole(step, f"it fails on a part ({error})")
            return
        found = Findings.from_json(broadcast_json(found.to_json(), self.groups.pipeline, self.device, self.last_rank))
        self._found[step.key] = found = found.beside(before)
        found.teach(self.capture, step.key)
        if found.differences:
            self.keep_whole(step, f"{found.text()}. torchmetrics objects see whole batches")

    def run_again(
        self, divided: PartitionedModule, step: LightningStep, batch: Any, microbatches: Sequence[MicroBatch]
    ) -> None:
        """Try ``step`` on a ``batch`` that was cut so, if it did there what it never did. Collective."""
        if not divided.take_unforeseen(step) or not divided.options.partition.check or self.cutter.is_whole(step):
            return
        rows = self.cutter.pair(batch, microbatches)
        if rows is None:
            return
        self._times[step.key] += 1
        if self._times[step.key] > _MOST_TIMES:
            self.keep_whole(step, "it does something else in too many batches")
            return
        self.run(divided, step, rows)
        divided.take_unforeseen(step)  # of the trial

    def _share(self, state: KeptState | None) -> KeptState | None:
        """That of the rank where steps end. Collective over the pipeline."""
        found = broadcast_structure(state, self.groups.pipeline, self.last_rank, self.device)
        return found if found is None or isinstance(found, KeptState) else KeptState(**found)

    def keep_whole(self, step: LightningStep, why: str) -> None:
        """Each batch of ``step`` is one micro-batch from here on. On all ranks of the pipeline."""
        step.forget()
        self.cutter.keep_whole(step)
        if dist.get_rank() == 0:
            warnings.warn(
                f"`{step.hook}` runs each batch as one micro-batch, without overlap of stages, as parts of a batch do "
                f"not make up what it shows for the batch: {why}.",
                stacklevel=2,
            )

    def is_told_more(self, step: LightningStep) -> bool:
        """Whether values that micro-batches have just logged end a doubt. Collective where there is one."""
        doubts = self._found[step.key].doubts if self.has(step) else {}
        if not doubts or self.cutter.is_whole(step):
            return False
        told = any(disagree(rules, self.capture.values_logged(name)) for name, rules in doubts.items())
        return bool(broadcast_json(told, self.groups.pipeline, self.device, self.last_rank))


class Lockstep:
    """Which steps run so, and the run of one.

    A validation step that generates text calls its modules as often as the text is long; it cannot be cut into stages.
    Within the view of the whole module it runs on every rank as it is, on the whole batch.
    """

    def __init__(self) -> None:
        self._reasons: dict[Any, str] = {}  # by key of a step

    def has(self, step: LightningStep) -> bool:
        """Whether ``step`` was found to need it."""
        return step.key in self._reasons

    def take(self, step: LightningStep, error: BaseException) -> None:
        """From now on ``step`` runs so, as it fails as a pipeline with ``error`` on every rank of it.

        Raises:
            BaseException: ``error``, if it is about another rank.
        """
        if isinstance(error, RankFailedError):
            raise error
        self._reasons[step.key] = str(error)
        if dist.get_rank() == 0:
            warnings.warn(
                f"`{step.hook}` runs in lockstep: all ranks run it on the whole batch, and each operation is done by "
                "the rank that has the parameters. That is right, but slower than one process. It cannot be pipelined: "
                f"{error}",
                stacklevel=2,
            )

    @staticmethod
    def run(step: LightningStep, batch: Any, size: int, view: GlobalView) -> StepResults:
        """What the step logs and returns for ``batch``, of ``size`` rows, on every rank. Collective."""
        microbatch = MicroBatch(batch, size, 1.0)
        try:
            with step.capture.left.unwatched(), step.around(0, microbatch, keep=True):
                output = step(microbatch)
            return step.capture.results([output], view.plain)
        finally:
            step.forget()
