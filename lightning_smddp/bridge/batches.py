"""A batch of a step in micro-batches: how many, cut how, and how much each of them counts.

A batch is cut by the user's functions, else along dimension 0; where that may not be the rows, it is one micro-batch,
said once: nothing is tried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_smddp.bridge.loss_weights import LossWeight, given_weight
from lightning_smddp.bridge.partitioned_module import RunSetup
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.pipeline.partition.batch_sync import BatchSync
from lightning_smddp.pipeline.partition.microbatches import (
    MicroBatch,
    MicroBatches,
    Splitter,
    UnclearBatchError,
    has_time_first,
    looks_at_other_rows,
)
from lightning_smddp.pytree import leaves

MOST_PER_RANK = 4  # 4 p micro-batches already keep p ranks more than 80 % busy; more are smaller and less efficient
ENOUGH_PER_RANK = 2
BATCH_NORM_ROWS = 16  # of a micro-batch at least with "auto", where BatchNorm trains
_CURE = (
    "Give the module a method `split_batch(batch, num_microbatches)` that returns a list of pairs of a batch and its "
    "number of rows, or the strategy PartitionOptions(split_batch=...) or (batch_size_fn=...); "
    "num_microbatches=1 says that one micro-batch is what you want."
)


class MicroBatcher:
    """Cuts the batches of one run into micro-batches, with their weights.

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
        self._named: LossWeight | None = None  # what the user's option means for training batches
        self._whole: set[Any] = set()  # keys of steps whose batches are one micro-batch each
        self._is_said = False  # that a batch cannot be cut

    def split(self, batch: Any, step: LightningStep) -> MicroBatches:
        """The micro-batches of a batch for ``step``, weighted. All ranks of the pipeline have the same batch."""
        parts = self._split(batch, step)
        self.count = len(parts)
        if len(parts) == 1:
            return parts
        on_host = self._sync.on_host if self.splitter.split_batch is None else None  # cut by rows, as its parts are
        return self.loss_weight(batch, step).apply(parts, on_host)

    def loss_weight(self, batch: Any, step: LightningStep) -> LossWeight:
        """How micro-batches of ``step`` count: as the user said, as the trial has found, else by rows.

        Raises:
            ValueError: a training batch has not what the user has named. Others count by rows then.
        """
        try:
            given = given_weight(self.options.loss_weight, batch, self._named if step.trains else None)
        except ValueError:
            if step.trains:
                raise
            return LossWeight()
        if step.trains:
            self._named = given
        return given or self.chosen or LossWeight()

    def whole(self, batch: Any) -> MicroBatch:
        """All of a batch as one."""
        self.count = 1
        return self.splitter.whole(batch)

    def keep_whole(self, step: LightningStep, why: Exception) -> None:
        """From now on each batch of ``step`` is one micro-batch, said once. On all ranks of the pipeline."""
        self._whole.add(step.key)
        rank_zero_warn(f"`{step.hook}` runs each batch as one micro-batch, without overlap of stages: {why}")

    def _split(self, batch: Any, step: LightningStep) -> MicroBatches:
        setup, count = self.setup, self.options.num_microbatches
        if step.key in self._whole or count == 1:
            return [self.splitter.whole(batch)]
        try:
            rows = self.splitter.rows(batch, loader_sizes(setup.module.trainer, step.hook, step.arguments))
            if count is None:
                ranks = setup.groups.pipeline.size()
                count = count_for(self.options.schedule, ranks, setup.num_stages, rows, setup.module)
            return self.splitter.split(batch, count, rows)
        except UnclearBatchError as error:
            if not self._is_said:
                self._is_said = True
                rank_zero_warn(f"smddp_pipeline runs batches as one micro-batch, without overlap: {error}. {_CURE}")
            return [self.splitter.whole(batch)]


def splitter_for(module: Any, options: Any) -> Splitter:
    """Cuts batches of ``module`` by the user's functions where there are some."""
    split = getattr(module, "split_batch", None)
    if options.split_batch is not None or not callable(split):  # an attribute of this name may be anything
        split = options.split_batch
    return Splitter(options.batch_size_fn, split, has_time_first(module))


def count_for(schedule: Any, ranks: int, num_stages: int, rows: int, module: Any) -> int:
    """How many micro-batches ``"auto"`` makes of ``rows`` for a pipeline of ``ranks`` with ``num_stages``.

    The largest number up to 4 for each rank that the schedule allows and that divides the batch, if that is at least 2
    for each rank; else the largest up to 4 for each rank: micro-batches of unequal size are exact, but wait for each
    other.
    """
    most = max(1, rows // BATCH_NORM_ROWS) if looks_at_other_rows(module) else rows

    def is_allowed(count: int) -> bool:
        return bool(schedule.microbatches_ok(count, ranks, num_stages))

    # Each batch comes here, and may have many rows: not all numbers are tried.
    few = min(most, MOST_PER_RANK * ranks)
    wanted = list(filter(is_allowed, range(1, few + 1)))
    even = [count for count in wanted if count >= ENOUGH_PER_RANK * ranks and rows % count == 0]
    if wanted:
        return max(even or wanted)
    return next(filter(is_allowed, range(few + 1, most + 1)), most)  # the schedule runs as another one where none is


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
    loaders = leaves(getattr(trainer, _LOADERS[hook]))
    if hook != "training_step" and len(arguments) > 1:  # (batch, batch_idx, dataloader_idx)
        loaders = loaders[arguments[1] : arguments[1] + 1]
    sizes = [_sizes(loader) for loader in loaders]
    return sum(sizes, ()) if all(sizes) else ()


def _sizes(loader: Any) -> tuple[int, ...]:
    """The usual size, and that of the last batch if it is another (else 0)."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if not isinstance(size, int):
        return ()
    try:
        return (size, len(sampler.sampler) % size)  # type: ignore[union-attr]
    except (AttributeError, TypeError):  # a stream, or a sampler without length
        return (size,)
