"""Into which micro-batches a batch is cut, and how much each counts: by the user's functions, else along dimension 0.

Where the first dimension may not be that of the rows, a batch is one micro-batch, said once: nothing is tried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_smddp.bridge.module_states import RunSetup, warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.pipeline.partition.batch_sync import BatchSync
from lightning_smddp.pipeline.partition.loss_weights import LossWeight, given_weight
from lightning_smddp.pipeline.partition.microbatches import (
    MicroBatch,
    Splitter,
    UnclearBatchError,
    has_time_first,
    looks_at_other_rows,
)
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

    def is_whole(self, step: LightningStep) -> bool:
        """Whether batches of ``step`` are one micro-batch each, whatever is in them."""
        return step.key in self._whole or self.options.num_microbatches == 1

    def _cut(self, batch: Any, step: LightningStep) -> list[MicroBatch]:
        if self.is_whole(step):
            return [self.splitter.whole(batch)]
        sizes = loader_sizes(getattr(self.setup.module, "trainer", None), step.hook, step.arguments)
        try:
            rows = self.splitter.rows(batch, sizes)
            count = self.options.num_microbatches or auto_count(self.setup, rows)
            return self.splitter.cut(batch, count, rows)
        except UnclearBatchError as error:
            self._say_once(str(error).partition(";")[0])
            return [self.splitter.whole(batch)]

    def _say_once(self, why: str) -> None:
        reason, _, _ = why.partition("(")  # the numbers in parentheses differ from batch to batch
        if reason not in self._said:
            self._said.add(reason)
            warn_on_first_rank(f"smddp_pipeline runs batches as one micro-batch, without overlap: {why}. {_CURE}")


def splitter_for(module: Any, options: Any) -> Splitter:
    """Cuts batches of ``module`` by the user's functions where there are some."""
    hook = options.split_batch or getattr(module, "split_batch", None)
    return Splitter(options.batch_size_fn, hook if callable(hook) else None, has_time_first(module))


def auto_count(setup: RunSetup, rows: int) -> int:
    """Micro-batches for a batch of ``rows``; where the schedule allows none, its substitute takes all there are."""
    return count_for(setup.options.schedule, setup.groups.pipeline.size(), setup.num_stages, rows, setup.module)


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
    # A training batch may come of all loaders at once; an evaluation batch is of one, and the step is told which.
    loaders = getattr(trainer, _LOADERS[hook], None)
    every = leaves(getattr(loaders, "iterables", loaders))  # a CombinedLoader has them there
    index = None  # of the loader: evaluation steps are called with (batch, batch_idx, dataloader_idx)
    if len(arguments) > 1:
        index = arguments[1]
    if hook != "training_step" and isinstance(index, int) and index < len(every):
        every = [every[index]]
    usual: list[int] = []
    last: list[int] = []
    for loader in every:
        sizes = _sizes(loader)
        if not sizes:
            return ()
        usual.append(sizes[0])
        last += sizes[1:]
    return tuple(dict.fromkeys([*usual, *last]))


def _sizes(loader: Any) -> tuple[int, ...]:
    """The usual size, and that of the last batch if it is another."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if not isinstance(size, int):
        return ()
    if getattr(loader, "drop_last", False) or getattr(sampler, "drop_last", False):
        return (size,)
    try:
        rest = len(sampler.sampler) % size  # type: ignore[union-attr]
    except (AttributeError, TypeError):  # a stream, or a sampler without length
        return (size,)
    if rest:
        return (size, rest)
    return (size,)
