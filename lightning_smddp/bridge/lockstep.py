"""Steps that cannot be cut, in lockstep: all ranks run them, and each operation is done where its values are."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist

from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.bridge.step_results import StepResults
from lightning_smddp.communication.errors import RankFailedError
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.view.global_view import GlobalView


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
