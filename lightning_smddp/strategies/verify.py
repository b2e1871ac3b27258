"""``lightning-smddp verify``: one batch of a user's module, in a pipeline and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_smddp.pipeline.verification import Finding, VerificationError
from lightning_smddp.strategies.lightning import PipelineStrategy
from lightning_smddp.strategies.tables import print_table


class _ShowFindings(Callback):
    """Prints the comparison on the first rank, whatever came out of it."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.is_global_zero:
            strategy = trainer.strategy
            assert isinstance(strategy, PipelineStrategy)
            show(strategy.findings)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, VerificationError) and trainer.is_global_zero:
            show(exception.findings)


def verify(module: LightningModule, data: LightningDataModule | None, ranks: int, **options: Any) -> int:
    """Train one batch under ``PipelineStrategy(**options)`` on ``ranks`` CPU processes, and print the comparison.

    Returns:
        0 if the pipeline computes what the module computes, 1 if not.
    """
    if data is None and not is_overridden("train_dataloader", module):
        print(f"{type(module).__name__} has no train_dataloader: give --datamodule module:Class.")
        return 1
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=PipelineStrategy(start_method="spawn", **options),
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_ShowFindings()],
    )
    try:
        trainer.fit(module, datamodule=data)
    except Exception as error:  # of a child, as text
        print(f"\n{error}")
        return 1
    print("The pipeline computes what the module computes in one process.")
    return 0


def show(findings: Sequence[Finding]) -> None:
    """A row for the loss and for each unit."""
    rows = [
        (
            finding.name if finding.stage is None else f"{finding.name} (stage {finding.stage})",
            f"one process {finding.expected:.7g}, pipeline {finding.actual:.7g}, difference {finding.difference:.1e}",
        )
        for finding in findings
    ]
    print_table("verify: the loss, and the norm of each unit's gradient", rows)
