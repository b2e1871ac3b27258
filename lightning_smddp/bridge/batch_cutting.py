"""Into which micro-batches each batch of a run is cut; one, with a word about it, where no cut is known to be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.bridge.partition_table import looks_at_other_rows
from lightning_smddp.bridge.run_setup import RunSetup, warn_on_first_rank
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.bridge.step_results import Observed, StepResults
from lightning_smddp.pipeline.capture.constant_random import without_chance
from lightning_smddp.pipeline.capture.preserve_state import kept_parameters, preserve_state
from lightning_smddp.pipeline.partition.loss_weights import Weighting
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, UnclearBatchError, combine, rows_of
from lightning_smddp.pipeline.partition.plan import first_decides
from lightning_smddp.pipeline.partition.rows import Evidence, Splitter, evidence, has_time_first
from lightning_smddp.pipeline.partition.weight_trials import EXACT, find_weighting
from lightning_smddp.pipeline.runtime.host_values import HostValues
from lightning_smddp.planner.schedules import auto_num_microbatches
from lightning_smddp.wire.broadcast import broadcast_json
from lightning_smddp.wire.pytree import leaves, map_leaves, tensors

_FEW = 4  # rows are enough to compare with their halves
_CURE = (
    "Give the module a method `split_batch(batch, num_microbatches)` that returns a list of batches (or of pairs of a "
    "batch and its number of rows), or the strategy PartitionOptions(split_batch=...) or (batch_size_fn=...); "
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
        if not callable(hook):
            hook = None
        self.splitter = Splitter(self.options.partition.batch_size_fn, hook)
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
        if count < 2:
            return rows
        return self.splitter.cut(batch, count, rows.size)[0]

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
            if rows is None:
                likely = self._likely_rows(batch, step)
            else:
                likely = max(1, rows)
            count = self._auto_count(likely)
        if count == 1 and self.splitter.split_batch is None:
            self.splitter.cut(batch, 2, rows)  # raises if nobody knows its rows
        return self.splitter.cut(batch, count, rows)

    def _likely_rows(self, batch: Any, step: LightningStep) -> int:
        """For the number of micro-batches alone: the user's function may see rows that are not seen here."""
        rows = rows_of(batch)
        if self.splitter.split_batch is None:
            return rows
        sizes = self._loader_sizes(step)
        if sizes:
            return max(1, sizes[0])
        if rows > 1:
            return rows
        return 4 * self.setup.groups.pipeline.size()

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
    index = None  # of the loader: evaluation steps are called with (batch, batch_idx, dataloader_idx)
    if len(arguments) > 1:
        index = arguments[1]
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
    if rest:
        return (size, rest)
    return (size,)


_TOLERANCE = 1e-5  # relative; rounding in another order is less


def rows_by_loss(
    step: LightningStep,
    batch: MicroBatch,
    found: Evidence,
    setup: RunSetup,
) -> bool:
    """Whether rows come first in batches of a training step: the first rank tries it. Collective over the pipeline.

    Args:
        step: the training step.
        batch: all of one.
        found: what its shapes say.
        setup: of the run; the module is whole.
    """
    module = setup.module

    def loss(microbatch: MicroBatch) -> float:
        with step.capture.left.before_traces():
            return float(loss_of(step.observed([microbatch]).results.output, step.hook, detached=True))

    def decide() -> bool:
        for trains in (False, True):  # some models do something else in evaluation mode
            with (
                preserve_state(module, setup.device),
                kept_parameters(module),
                without_chance(setup.device),
                torch.no_grad(),
            ):
                module.train(trains)
                answer = _try_order(loss, batch, found)
            if answer is not None:
                return answer
        return found == "square" and not has_time_first(module)

    return bool(first_decides(decide, setup.groups.pipeline, setup.device))


def _try_order(loss: Callable[[MicroBatch], float], batch: MicroBatch, found: Evidence) -> bool | None:
    """Whether rows can be reordered; None if the loss is random, or the step cannot be run."""
    order = order_of(batch.size)
    try:
        whole = loss(batch)
        if not _close(whole, loss(batch)):
            return None
        rows_free = _close(whole, loss(batch.with_rows_in(order)))
        if found == "doubt":
            return rows_free and _made_up_of_parts(loss, batch, whole)
        columns_free = _close(whole, loss(replace(batch, value=_with_columns_in_order(batch.value, order))))
        if not columns_free:
            return True  # the second dimension is not that of the rows, and one of the two is
        return rows_free and _made_up_of_parts(loss, batch, whole)
    except Exception:  # whatever the step raises: it will again, where it counts
        return None


def _made_up_of_parts(loss: Callable[[MicroBatch], float], batch: MicroBatch, whole: float) -> bool:
    """Whether some weights make the loss of the batch of those of its halves."""
    weighting, _ = find_weighting(loss, batch, lambda value: replace(batch, value=value).split(2))
    predicted = sum(part.weight * loss(part) for part in weighting.apply(batch.split(2)))
    return _close(whole, predicted, EXACT)


def _with_columns_in_order(value: Any, order: list[int]) -> Any:
    """As if the second dimension of square tensors were the rows."""

    def ordered(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if leaf.dim() > 1 and leaf.shape[:2] == (len(order), len(order)):
            return leaf[:, order]
        if leaf.shape[0] == len(order):
            return leaf[order]
        return leaf

    return map_leaves(ordered, value)


def rows_by_results(run: Callable[[MicroBatch], Observed | None], batch: MicroBatch, setup: RunSetup) -> bool:
    """The same for an evaluation step, by its results on the rank where it ends. Collective over the pipeline.

    Args:
        run: the step for nothing, through the pipeline.
        batch: all rows.
        setup: of the run.
    """
    parts = batch.split(2)
    observed = [run(rows) for rows in (batch, batch.with_rows_in(order_of(batch.size)), *parts)]
    found = False
    if setup.ends_here:
        whole, permuted, *halves = [some.results for some in observed if some is not None]
        outputs = _same_outputs(whole.output, [half.output for half in halves], [part.size for part in parts])
        found = bool(whole.logs)
        if outputs is not None:
            found = outputs
        found = found and _same_logs(whole, permuted)
    return bool(broadcast_json(found, setup.groups.pipeline, setup.device, setup.last_rank))


def _same_outputs(whole: Any, halves: list[Any], sizes: list[int]) -> bool | None:
    """Whether the halves' outputs make up the whole's; None if there are no tensors to compare."""
    if not tensors(whole):
        return None
    try:
        combined = tensors(combine(halves, sizes))
    except ValueError:
        return False
    pairs = list(zip(tensors(whole), combined, strict=False))
    return all(one.shape == other.shape and torch.allclose(one, other, 1e-4, 1e-6) for one, other in pairs)


def _same_logs(whole: StepResults, permuted: StepResults) -> bool:
    values = [[leaf for leaf in leaves([log.value for log in r.logs]) if _is_number(leaf)] for r in (whole, permuted)]
    return all(_close(float(one), float(other)) for one, other in zip(*values, strict=False))


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float)) or (isinstance(leaf, Tensor) and leaf.numel() == 1)


def order_of(count: int) -> list[int]:
    """Some order of ``count`` rows that is neither the usual one nor its reverse, as far as there are others."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    usual = list(range(count))
    if order in (usual, usual[::-1]):
        order = usual[1:] + usual[:1]
    return order


def _close(one: float, other: float, tolerance: float = _TOLERANCE) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
