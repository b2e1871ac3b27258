"""Into which micro-batches each batch of a run is cut; one, with a word about it, where no cut is known to be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_smddp.bridge.partition_table import looks_at_other_rows
from lightning_smddp.bridge.row_trials import rows_by_loss
from lightning_smddp.bridge.run_setup import RunSetup, warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep
from lightning_smddp.pipeline.partition.loss_weights import Weighting
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UnclearBatchError, rows_of
from lightning_smddp.pipeline.partition.row_evidence import Evidence, evidence, has_time_first
from lightning_smddp.pipeline.partition.splitter import Splitter
from lightning_smddp.pipeline.runtime.host_values import HostValues
from lightning_smddp.planner.microbatches import auto_num_microbatches
from lightning_smddp.wire.pytree import leaves

_FEW = 4  # rows are enough to compare with their halves
_CURE = (
    "Give the module a method `split_batch(batch, num_microbatches)` that returns a list of batches (or of pairs of a "
    "batch and its number of rows), or PipelineStrategy the argument split_batch= or batch_size_fn=; "
    "num_microbatches=1 says that one micro-batch is what you want."
)


class BatchCutter:
    """Cuts the batches of one run into micro-batches.

    Args:
        setup: of the run; the module's method ``split_batch`` is used if it has one.
        values: what the host knows of the batch on the device.
    """

    def __init__(self, setup: RunSetup, values: HostValues) -> None:
        self.setup, self.module, self.options = setup, setup.module, setup.options
        self._values = values
        hook = self.options.partition.split_batch or getattr(setup.module, "split_batch", None)
        self.splitter = Splitter(self.options.partition.batch_size_fn, hook if callable(hook) else None)
        self.looks_across_rows = False  # the loss: no weights make it of those of micro-batches
        self._rows_first: dict[Any, bool] = {}  # by step: what was found for it
        self.parts_fail = False  # the training step, run on a part of a batch: so others are likely to
        self._whole: set[Any] = set()  # steps whose batches are one micro-batch each
        self.may_try = True  # to cut batches of the training step, to see what that does
        self._said: set[str] = set()

    def cut(self, batch: Any, step: LightningStep, can_try: bool) -> list[MicroBatch]:
        """Its micro-batches. Collective over the pipeline, whose ranks have the same batch.

        Args:
            batch: any.
            step: that it is for.
            can_try: whether the whole module is on each rank, so that the step can be run as it is.
        """
        if self.is_whole(step):
            return [self.splitter.whole(batch)]
        try:
            parts = self._cut(batch, step)
        except UnclearBatchError as error:
            self._say_once(str(error).partition(";")[0])
            return [self.splitter.whole(batch)]
        if (
            len(parts) == 1
            or self.splitter.split_batch is not None
            or self._rows_come_first(batch, parts, step, can_try)
        ):
            return parts
        return [self.splitter.whole(batch)]

    def weighted(self, weighting: Weighting, microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of a batch with their weights."""
        return weighting.apply(microbatches, self._values.of)

    def doubtful(self, batch: Any, step: LightningStep) -> MicroBatch | None:
        """The whole batch, if :meth:`cut` left it whole only because nobody has tried yet whether rows come first."""
        if self.is_whole(step) or self._known(step) is not None:
            return None
        try:
            parts = self._cut(batch, step)
        except UnclearBatchError:
            return None
        if len(parts) < 2 or self.splitter.split_batch is not None or self._evidence(batch, parts, step) == "rows":
            return None
        return MicroBatch(batch, sum(part.size for part in parts), 1.0, parts[0].paths)

    def is_whole(self, step: LightningStep) -> bool:
        """Whether it is known that each batch is one micro-batch."""
        if self.parts_fail or step.key in self._whole:
            return True
        if step.trains and not self.may_try and self.options.num_microbatches is None and self._normalises(step):
            return True
        if self.looks_across_rows and self.options.num_microbatches is None:
            return step.hook != "predict_step"  # which has no loss
        return self.options.num_microbatches == 1

    def consequence(self) -> str:
        """What becomes of batches where the loss looks across rows, for messages."""
        if self.options.num_microbatches is None:
            return "From here on each batch runs as one micro-batch: right, but without overlap of stages."
        return "The num_microbatches that you gave is used: num_microbatches=1 has the numbers of one process."

    def _normalises(self, step: LightningStep) -> bool:
        """Whether layers normalise over rows, perhaps since they are no longer frozen. Then it is the same for ever."""
        norms = looks_at_other_rows(self.module)
        if norms:
            self.keep_whole(step)
            warn_on_first_rank(
                f"In training {norms[0]} (BatchNorm) sees all rows that it is given, so from here on each batch is "
                "one micro-batch, without overlap of stages. A num_microbatches that you give is used, with other "
                "numbers than those of one process."
            )
        return bool(norms)

    def keep_whole(self, step: LightningStep) -> None:
        """From now on each batch of ``step`` is one micro-batch."""
        self._whole.add(step.key)

    def refuse_parts(self, step: LightningStep, why: str) -> None:
        """The same, with a warning, where a step has just been run on parts. On all ranks of the pipeline."""
        step.forget()
        self.keep_whole(step)
        warn_on_first_rank(
            f"`{step.hook}` runs each batch as one micro-batch, without overlap of stages, as parts of a batch do "
            f"not make up what it shows for the batch: {why}."
        )

    def learn(self, step: LightningStep, rows_first: bool) -> None:
        """Rows of batches of ``step`` come first, or not."""
        self._rows_first[step.key] = rows_first

    def pair(self, batch: Any, microbatches: Sequence[MicroBatch]) -> MicroBatch | None:
        """As many rows as two micro-batches have, and four if there are; None if the batch is not cut."""
        if len(microbatches) < 2:
            return None
        rows = self.together(batch, microbatches)
        count = min(len(microbatches) // 2, rows.size // _FEW)
        return rows if count < 2 else self.splitter.cut(batch, count, rows.size)[0]

    @staticmethod
    def together(batch: Any, microbatches: Sequence[MicroBatch]) -> MicroBatch:
        """All rows of a batch that was cut into these, to be cut in the same way."""
        rows = sum(microbatch.size for microbatch in microbatches)
        return MicroBatch(batch, rows, 1.0, microbatches[0].paths, microbatches[0].cuts)

    def _cut(self, batch: Any, step: LightningStep) -> list[MicroBatch]:
        rows = self.splitter.rows(batch)
        try:
            return self._cut_rows(batch, step, rows)
        except UnclearBatchError:
            if rows is None:
                rows = next((n for n in self._loader_sizes(step) if n > 1 and _fits(self.splitter, batch, n)), None)
            if rows is None:
                raise
            return self._cut_rows(batch, step, rows)  # the batch leaves it open, and its loader does not

    def _cut_rows(self, batch: Any, step: LightningStep, rows: int | None) -> list[MicroBatch]:
        count = self.options.num_microbatches
        if count is None:
            count = self._auto_count(self._likely_rows(batch, step) if rows is None else max(1, rows))
        if count == 1 and self.splitter.split_batch is None:
            self.splitter.cut(batch, 2, rows)  # raises if nobody knows its rows
        return self.splitter.cut(batch, count, rows)

    def _likely_rows(self, batch: Any, step: LightningStep) -> int:
        """For the number of micro-batches alone: the user's function may see rows that are not seen here."""
        rows = rows_of(batch)
        if self.splitter.split_batch is None:
            return rows
        return max(1, next(iter(self._loader_sizes(step)), rows if rows > 1 else 4 * self.setup.groups.pipeline.size()))

    def _loader_sizes(self, step: LightningStep) -> tuple[int, ...]:
        return loader_sizes(getattr(self.module, "trainer", None), step.hook, step.arguments)

    def _evidence(self, batch: Any, parts: Sequence[MicroBatch], step: LightningStep) -> Evidence:
        rows = sum(part.size for part in parts)
        if self.splitter.batch_size_fn is not None:
            return evidence(batch, rows, (rows,), told=True)
        return evidence(batch, rows, self._loader_sizes(step))

    def _known(self, step: LightningStep) -> bool | None:
        """What was found out about this step, or about training, whose batches are of the same kind as a rule."""
        return self._rows_first.get(step.key, self._rows_first.get(("training_step", ())))

    def _rows_come_first(self, batch: Any, parts: Sequence[MicroBatch], step: LightningStep, can_try: bool) -> bool:
        known = self._known(step)
        rows = sum(part.size for part in parts)
        if known is None:
            found = self._evidence(batch, parts, step)
            if found != "rows" and not step.trains:
                return False  # until it is tried out
            whole = MicroBatch(batch, rows, 1.0, parts[0].paths)
            if found == "rows":
                known = True
            elif can_try:
                known = rows_by_loss(step, whole, found, self.setup)
            else:
                known = found == "square" and not has_time_first(self.module)
            self.learn(step, known)
        if not known:
            self._say_once(
                f"neither its loader nor a trial shows that the first dimension ({rows}) is that of the rows"
            )
        return known

    def _say_once(self, why: str) -> None:
        if why.split("(")[0] in self._said:
            return
        self._said.add(why.split("(")[0])
        warn_on_first_rank(f"smddp_pipeline runs batches as one micro-batch, without overlap: {why}. {_CURE}")

    def _auto_count(self, rows: int) -> int:
        """Micro-batches for a batch of ``rows``; where the schedule allows none, its substitute takes all there are."""
        ranks = self.setup.groups.pipeline.size()
        least = 2 if looks_at_other_rows(self.module) else 1  # it refuses a single row

        def allowed(count: int) -> bool:
            return self.options.schedule.microbatches_ok(count, ranks, self.setup.num_stages) and rows // count >= least

        if not any(allowed(count) for count in range(1, rows + 1)):
            return rows
        return auto_num_microbatches(rows, ranks, allowed)


def _fits(splitter: Splitter, batch: Any, rows: int) -> bool:
    try:
        return len(splitter.cut(batch, 2, rows)) == 2
    except UnclearBatchError:
        return False


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
    loaders = getattr(trainer, _LOADERS[hook], None)
    every = leaves(getattr(loaders, "iterables", loaders))  # a CombinedLoader has them there
    index = arguments[1] if len(arguments) > 1 else None
    if hook != "training_step" and isinstance(index, int) and index < len(every):
        every = [every[index]]
    found = [_sizes(loader) for loader in every]
    if not all(found):
        return ()
    usual, last = [sizes[0] for sizes in found], [size for sizes in found for size in sizes[1:]]
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
    return (size, rest) if rest else (size,)
