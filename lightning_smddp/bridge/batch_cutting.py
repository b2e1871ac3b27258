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

_FEW = 4  # as many rows are enough to compare with their halves
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
        self.setup = setup
        self.module = setup.module
        self.options = setup.options
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
        if len(parts) == 1 or self.splitter.split_batch is not None:
            return parts
        if self._rows_come_first(batch, parts, step, can_try):
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
        if len(parts) < 2 or self.splitter.split_batch is not None:
            return None
        if self._evidence(batch, parts, step) == "rows":
            return None
        return _whole_of(batch, parts)

    def is_whole(self, step: LightningStep) -> bool:
        """Whether it is known that each batch is one micro-batch."""
        if self.parts_fail or step.key in self._whole:
            return True
        if self.options.num_microbatches is not None:
            return self.options.num_microbatches == 1
        if step.trains and not self.may_try and self._normalises(step):
            return True
        return self.looks_across_rows and step.hook != "predict_step"  # which has no loss

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
        num_pairs = min(len(microbatches) // 2, rows.size // _FEW)
        if num_pairs < 2:
            return rows
        pairs = self.splitter.cut(batch, num_pairs, rows.size)
        return pairs[0]

    @staticmethod
    def together(batch: Any, microbatches: Sequence[MicroBatch]) -> MicroBatch:
        """All rows of a batch that was cut into these, to be cut in the same way."""
        first = microbatches[0]
        rows = sum(microbatch.size for microbatch in microbatches)
        return MicroBatch(batch, rows, 1.0, first.paths, first.cuts)

    def _cut(self, batch: Any, step: LightningStep) -> list[MicroBatch]:
        rows = self.splitter.rows(batch)
        try:
            return self._cut_rows(batch, step, rows)
        except UnclearBatchError:
            # Where the batch leaves it open, its loader may not.
            if rows is None:
                rows = self._rows_by_loader(batch, step)
            if rows is None:
                raise
            return self._cut_rows(batch, step, rows)

    def _rows_by_loader(self, batch: Any, step: LightningStep) -> int | None:
        """The first size of the loader's batches by which this one can be cut in two."""
        for rows in self._loader_sizes(step):
            if rows > 1 and _fits(self.splitter, batch, rows):
                return rows
        return None

    def _cut_rows(self, batch: Any, step: LightningStep, rows: int | None) -> list[MicroBatch]:
        # A number that the user left open follows from the schedule and the rows. Where a `split_batch` alone knows the
        # rows, a likely number stands for them.
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
        if known is None:
            found = self._evidence(batch, parts, step)
            if found != "rows" and not step.trains:
                return False  # until it is tried out
            if found == "rows":
                known = True
            elif can_try:
                known = rows_by_loss(step, _whole_of(batch, parts), found, self.setup)
            else:
                known = found == "square" and not has_time_first(self.module)
            self.learn(step, known)
        if not known:
            rows = sum(part.size for part in parts)
            self._say_once(
                f"neither its loader nor a trial shows that the first dimension ({rows}) is that of the rows"
            )
        return known

    def _say_once(self, why: str) -> None:
        reason, _, _ = why.partition("(")  # the numbers in parentheses differ from batch to batch
        if reason in self._said:
            return
        self._said.add(reason)
        warn_on_first_rank(f"smddp_pipeline runs batches as one micro-batch, without overlap: {why}. {_CURE}")

    def _auto_count(self, rows: int) -> int:
        """Micro-batches for a batch of ``rows``; where the schedule allows none, its substitute takes all there are."""
        ranks = self.setup.groups.pipeline.size()
        schedule = self.options.schedule
        least = 1
        if looks_at_other_rows(self.module):
            least = 2  # a layer that normalises over rows refuses a single one

        def allowed(count: int) -> bool:
            return schedule.microbatches_ok(count, ranks, self.setup.num_stages) and rows // count >= least

        if not any(allowed(count) for count in range(1, rows + 1)):
            return rows
        return auto_num_microbatches(rows, ranks, allowed)


def _whole_of(batch: Any, parts: Sequence[MicroBatch]) -> MicroBatch:
    """All rows of a batch that was cut into ``parts``."""
    rows = sum(part.size for part in parts)
    return MicroBatch(batch, rows, 1.0, parts[0].paths)


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


# ---- by trials -------------------------------------------------------------------------------------------------------

_TOLERANCE = 1e-5  # relative; rounding in another order is less


def rows_by_loss(step: LightningStep, batch: MicroBatch, found: Evidence, setup: RunSetup) -> bool:
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
            output = step.observed([microbatch]).results.output
            return float(loss_of(output, step.hook, detached=True))

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
    # A loss that is a mean over rows is the same in another order of the rows. So it is over columns where these are
    # the rows: of a square batch, only one that does not bear another order of its columns has rows first for sure.
    order = order_of(batch.size)
    try:
        whole = loss(batch)
        if not _close(whole, loss(batch)):
            return None
        rows_free = _close(whole, loss(batch.with_rows_in(order)))
        if found == "doubt":
            return rows_free and _made_up_of_parts(loss, batch, whole)
        turned = replace(batch, value=_with_columns_in_order(batch.value, order))
        columns_free = _close(whole, loss(turned))
        if not columns_free:
            return True  # the second dimension is not that of the rows, and one of the two is
        return rows_free and _made_up_of_parts(loss, batch, whole)
    except Exception:  # whatever the step raises: it will again, where it counts
        return None


def _made_up_of_parts(loss: Callable[[MicroBatch], float], batch: MicroBatch, whole: float) -> bool:
    """Whether some weights make the loss of the batch of those of its halves."""

    def cut(value: Any) -> list[MicroBatch]:
        return replace(batch, value=value).split(2)

    weighting, _ = find_weighting(loss, batch, cut)
    predicted = 0.0
    for part in weighting.apply(batch.split(2)):
        predicted += part.weight * loss(part)
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
    # The batch, its rows in another order, and its halves: on the rank where the step ends, halves have to make up the
    # batch, and logged values must not depend on the order.
    parts = batch.split(2)
    permuted = batch.with_rows_in(order_of(batch.size))
    observed = [run(rows) for rows in (batch, permuted, *parts)]
    found = False
    if setup.ends_here:
        of_batch, of_permuted, *of_parts = [some.results for some in observed if some is not None]
        outputs = [results.output for results in of_parts]
        sizes = [part.size for part in parts]
        same = _same_outputs(of_batch.output, outputs, sizes)
        if same is None:
            same = bool(of_batch.logs)
        found = same and _same_logs(of_batch, of_permuted)
    return bool(broadcast_json(found, setup.groups.pipeline, setup.device, setup.last_rank))


def _same_outputs(whole: Any, halves: list[Any], sizes: list[int]) -> bool | None:
    """Whether the halves' outputs make up the whole's; None if there are no tensors to compare."""
    expected = tensors(whole)
    if not expected:
        return None
    try:
        combined = tensors(combine(halves, sizes))
    except ValueError:
        return False
    for one, other in zip(expected, combined, strict=False):
        if one.shape != other.shape or not torch.allclose(one, other, 1e-4, 1e-6):
            return False
    return True


def _same_logs(whole: StepResults, permuted: StepResults) -> bool:
    pairs = zip(_logged_numbers(whole), _logged_numbers(permuted), strict=False)
    return all(_close(one, other) for one, other in pairs)


def _logged_numbers(results: StepResults) -> list[float]:
    numbers = []
    for leaf in leaves([log.value for log in results.logs]):
        if isinstance(leaf, (int, float)) or (isinstance(leaf, Tensor) and leaf.numel() == 1):
            numbers.append(float(leaf))
    return numbers


def order_of(count: int) -> list[int]:
    """Some order of ``count`` rows that is neither the usual one nor its reverse, as far as there are others."""
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(count, generator=generator).tolist()
    usual = list(range(count))
    if order in (usual, usual[::-1]):
        order = usual[1:] + usual[:1]
    return order


def _close(one: float, other: float, tolerance: float = _TOLERANCE) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
