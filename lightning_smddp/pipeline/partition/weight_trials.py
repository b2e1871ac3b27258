"""Finds out how losses of micro-batches make up a batch's loss, by trials on some rows of the first batch.

For a loss that is a ratio of sums over rows, ``loss(a and b) = (w(a) loss(a) + w(b) loss(b)) / (w(a) + w(b))``. Each
weighting that the batch's tensors allow is a candidate; it has to be right in every trial. A fresh model has nearly
equal losses for all rows, with which any weights fit. So there are trials that tell candidates apart: in the first of
two parts only a few labels are left that count, and the first of a row counts in one part only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.partition.gradient_trials import NOISE, Misfit, Verdict, error_limit
from lightning_smddp.pipeline.partition.loss_weights import (
    IGNORED,
    LossCall,
    LossCalls,
    Weighting,
    warning_without_trial,
)
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.wire.pytree import Path, items, map_leaves

EXACT, MIXED = 1e-4, 1e-2  # relative errors that rounding may explain, in fp32 and with 16-bit types
_LOUDER = 4.0  # times all parameters; a power of two, so that dividing by it gives the very same numbers again
_FEWEST, _MOST_GROUPS = 4, 8  # of rows, in a trial with hard ones last
_MOST_LEAVES = 12  # of a batch that are tried as labels or masks,
_MOST_VALUES = 5  # and of each the values that may not count: every candidate costs time in every trial
_CALLED_SO = ("len", "num", "count", "size", "weight")  # in names of integers that may be weights of rows
_USUALLY_IGNORED = (IGNORED, -1, 0, 255)  # 0 for padded tokens, 255 in segmentation

LossOf = Callable[[MicroBatch], float]
Cut = Callable[[Any], list[MicroBatch]]
Judge = Callable[[Sequence[Weighting], Sequence[Weighting]], Verdict]


@dataclass
class _Trial:
    """The loss of some rows, and those of their parts."""

    parts: list[MicroBatch]
    whole: float
    losses: list[float]

    def predicted(self, weighting: Weighting) -> float:
        """What the loss of all rows is if ``weighting`` is right; parts that count nothing have no loss."""
        total = 0.0
        for part, loss in zip(weighting.apply(self.parts), self.losses, strict=True):
            if part.weight:  # else the loss is NaN where it is a mean over no labels
                total += part.weight * loss
        return total

    def error(self, weighting: Weighting) -> float:
        """How far ``weighting`` is from the loss of all rows, relative to the largest loss here; inf if not finite."""
        predicted = self.predicted(weighting)
        if not (math.isfinite(predicted) and math.isfinite(self.whole)):
            return math.inf
        scale = max(map(abs, [self.whole, *self.losses, 1e-8]))
        return abs(predicted - self.whole) / scale


@dataclass
class _Candidates:
    """What may be right, the first the most plausible, and the trials that have said so."""

    weightings: list[Weighting]
    tolerance: float
    trials: list[_Trial] = field(default_factory=list)

    def add(self, trial: _Trial, changed: bool = True) -> None:
        """Drop what it shows to be wrong. A trial with ``changed`` values that no candidate explains shows nothing."""
        # Wrong is what misses by more than the tolerance, and also what misses clearly where another hits: a fresh
        # model's losses are so alike that wrong weights miss by little. Below a share of the tolerance it is noise, and
        # nobody is clearly wrong.
        errors = [trial.error(weighting) for weighting in self.weightings]
        best = min(errors)
        if best > self.tolerance and changed:
            return
        self.trials.append(trial)
        limit = error_limit(best, self.tolerance)
        kept = []
        for weighting, error in zip(self.weightings, errors, strict=True):
            if error <= limit:
                kept.append(weighting)
        self.weightings = kept

    def distinct(self) -> list[Weighting]:
        """Those that are left and weigh the first trial's rows differently."""
        parts = self.trials[0].parts
        found: dict[tuple[float, ...], Weighting] = {}
        for weighting in self.weightings:
            shares = [round(part.weight, 9) for part in weighting.apply(parts)]
            found.setdefault(tuple(shares), weighting)
        return list(found.values())


def find_weighting(
    loss_of: LossOf,
    microbatch: MicroBatch,
    cut: Cut,
    tolerance: float = EXACT,
    louder: Callable[[], AbstractContextManager[object]] | None = None,
    may_be_whole: bool = False,
    gradients: Judge | None = None,
) -> tuple[Weighting, str | None]:
    """Which weights make micro-batches' losses the batch's.

    Args:
        loss_of: runs the step, without random numbers and without effects on the model.
        microbatch: some rows of a batch, at least two.
        cut: cuts what is like ``microbatch`` in two.
        tolerance: see ``EXACT`` and ``MIXED``.
        louder: makes a context in which losses of rows are less alike; see :func:`amplified`.
        may_be_whole: whether batches run as one micro-batch if no weighting is right; for the warning.
        gradients: says which of these (the second argument: of all conceivable ones) gradients fit, too.

    Returns:
        The weighting, and a warning if none is right, or if it is not certain which one is.
    """
    if len(cut(microbatch.value)) < 2:
        return Weighting(), None
    with LossCalls() as calls:
        first = _try(loss_of, microbatch.value, microbatch.size, cut)
    if not _are_close(loss_of(microbatch), first.whole, 1e-6):
        why = "the loss is another each time that it is computed for the same rows:"
        return Weighting(), warning_without_trial(microbatch, why)
    conceivable = _most_plausible_first(calls.found, microbatch)
    candidates = _Candidates(conceivable, tolerance)
    candidates.add(first, changed=False)
    again = _hard_rows_last(loss_of, microbatch, first, cut, tolerance)
    if again is not None and candidates.weightings:
        candidates.add(again, changed=False)
        first = again
    # Trials cost runs of the step, so each is made only while candidates are left that it could tell apart: first with
    # the rows as they are and thinned, then, if that was not enough, with a model whose losses are less alike.
    _tell_apart(candidates, loss_of, microbatch, cut)
    if louder is not None and len(candidates.distinct()) > 1:
        with louder():
            _tell_apart(candidates, loss_of, microbatch, cut)
    if not candidates.weightings:
        return Weighting(fits=False), _wrong(microbatch, first, may_be_whole)
    if gradients is not None:
        fitting = gradients(candidates.weightings, conceivable)
        if isinstance(fitting, Misfit):
            return Weighting(fits=False), _wrong_gradient(microbatch, fitting, may_be_whole)
        candidates.weightings = fitting
    left = candidates.distinct()
    if len(left) == 1:
        return candidates.weightings[0], None
    return candidates.weightings[0], _uncertain(microbatch, first, left)


def _tell_apart(candidates: _Candidates, loss_of: LossOf, microbatch: MicroBatch, cut: Cut) -> None:
    for changed in _changes(microbatch, candidates):
        trial = _attempt(loss_of, changed, microbatch.size, cut)
        if trial is not None:
            candidates.add(trial)


@contextmanager
def amplified(module: nn.Module) -> Iterator[None]:
    """All parameters times a power of two, so that a fresh model's losses are less alike; exactly undone."""
    parameters = []
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.layout == torch.strided:
            parameters.append(parameter)
    with torch.no_grad():
        if not all(map(_can_be_louder, parameters)):
            parameters = []  # it could not be undone
        for parameter in parameters:
            parameter.mul_(_LOUDER)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in parameters:
                parameter.div_(_LOUDER)


def _can_be_louder(parameter: Tensor) -> bool:
    """Whether no element overflows; NaN is not smaller than anything."""
    if parameter.numel() == 0:
        return True
    largest = float(parameter.abs().max())
    return largest < torch.finfo(parameter.dtype).max / _LOUDER


def _try(loss_of: LossOf, value: Any, size: int, cut: Cut) -> _Trial:
    parts = cut(value)
    whole = loss_of(MicroBatch(value, size, 1.0))
    losses = [loss_of(part) for part in parts]
    return _Trial(parts, whole, losses)


def _attempt(loss_of: LossOf, value: Any, size: int, cut: Cut) -> _Trial | None:
    """A trial with changed values; None if the step cannot work with them."""
    # Values were changed without knowing what they are for: a step may check them, or use them as indices.
    try:
        trial = _try(loss_of, value, size, cut)
    except Exception:  # of user code that was given what it did not expect: there is nothing to learn from it
        return None
    if not math.isfinite(trial.whole):
        return None
    return trial


def _hard_rows_last(
    loss_of: LossOf,
    microbatch: MicroBatch,
    first: _Trial,
    cut: Cut,
    tolerance: float,
) -> _Trial | None:
    """A trial of the same rows, those with large losses last; None where rows have to stay in their places.

    A mean over the hardest rows is that of its halves where each has as many of them, as by chance one in two of eight.
    """
    size = microbatch.size
    if microbatch.cuts is not None or size < _FEWEST:
        return None
    try:
        groups = microbatch.split(min(size // 2, _MOST_GROUPS))  # one row alone may be too few for a step
        losses = [loss_of(group) for group in groups]
        if not all(map(math.isfinite, losses)):
            return None
        order = _rows_by_loss(groups, losses)
        trial = _try(loss_of, microbatch.with_rows_in(order).value, size, cut)
    except Exception:  # of user code that was given rows in an order that it is not made for
        return None
    # The whole loss has to be the same in the new order, or rows mean something where they are (a sequence in time).
    if not _are_close(trial.whole, first.whole, NOISE * tolerance):
        return None
    if not all(map(math.isfinite, trial.losses)):
        return None
    return trial


def _rows_by_loss(groups: Sequence[MicroBatch], losses: Sequence[float]) -> list[int]:
    """The rows of all groups, which lie one behind the other, those of the group with the smallest loss first."""
    ends = [0, *itertools.accumulate(group.size for group in groups)]
    order: list[int] = []
    for index in sorted(range(len(groups)), key=losses.__getitem__):
        order += range(ends[index], ends[index + 1])
    return order


def _are_close(value: float, reference: float, tolerance: float) -> bool:
    """Whether they differ by no more than ``tolerance`` of ``reference``; NaN is close to nothing."""
    scale = max(abs(reference), 1e-8)
    return abs(value - reference) <= tolerance * scale


# ---- candidates ------------------------------------------------------------------------------------------------------


def _most_plausible_first(calls: Sequence[LossCall], microbatch: MicroBatch) -> list[Weighting]:
    """Labels that a loss was seen to be called with, then what else the batch's tensors allow.

    The order matters: of the candidates that no trial tells apart, the first one is used.
    """
    found: list[Weighting] = []
    for call in calls:
        found += call.weightings(microbatch.value)
    found += _conceivable(microbatch)
    return list(dict.fromkeys(found))


def _conceivable(microbatch: MicroBatch) -> Iterator[Weighting]:
    """Rows, sums, labels that are not one of some values, entries of masks."""
    yield Weighting()
    yield Weighting("sum")
    for path, leaf in _row_leaves(microbatch):
        skips = [0]
        if leaf.dim() == 2 and leaf.shape[1] > 2:
            skips = [0, 1, -1]  # a step may predict the next label, so that the first or the last one is left out
        for ignored in _values(leaf):
            for skip in skips:
                yield Weighting("labels", path, skip, ignored)
        has_weights = leaf.dim() == 1 and _may_weigh(path, leaf)
        if has_weights or _is_mask(leaf):
            for skip in skips:
                yield Weighting("entries", path, skip)


def _row_leaves(microbatch: MicroBatch) -> list[tuple[Path, Tensor]]:
    """Tensors with an entry for each row: integers and masks of any size, numbers one for each row."""
    found = []
    for path, leaf in items(microbatch.value):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        if len(leaf) != microbatch.size or leaf.is_complex():
            continue
        is_matrix_of_numbers = leaf.is_floating_point() and leaf.dim() > 1
        if not is_matrix_of_numbers or _is_mask(leaf):
            found.append((path, leaf))
    return found[:_MOST_LEAVES]


def _values(leaf: Tensor) -> list[int]:
    """Which labels may not count: negative ones, the usual numbers, what most rows begin or end with."""
    if leaf.dtype == torch.bool or leaf.is_floating_point():
        return []
    # Only what is there can be left out: a candidate for a value that no row has weighs as the rows do.
    present = leaf.unique()
    negative = present[present < 0].tolist()
    usual = [value for value in _USUALLY_IGNORED if bool((present == value).any())]
    values = [*usual, *negative]
    if leaf.dim() > 1:
        rows = leaf.flatten(1)
        for position in (0, -1):
            most_common = rows[:, position].mode().values
            values.append(int(most_common))
    return list(dict.fromkeys(values))[:_MOST_VALUES]


def _may_weigh(path: Path, leaf: Tensor) -> bool:
    """Whether numbers of rows are weights of theirs, or lengths; integers are only if they are called so."""
    if not bool((leaf > 0).all()):
        return False
    name = _last_key(path)
    return leaf.is_floating_point() or any(part in name for part in _CALLED_SO)


def _last_key(path: Path) -> str:
    """What a batch calls the tensor at ``path``, in lower case."""
    if not path:
        return ""
    return str(path[-1]).lower()


def _is_mask(leaf: Tensor) -> bool:
    if leaf.dtype == torch.bool:
        return True
    if leaf.dim() < 2:
        return False
    is_flag = (leaf == 0) | (leaf == 1)
    return bool(is_flag.all())


# ---- trials ----------------------------------------------------------------------------------------------------------


def _changes(microbatch: MicroBatch, candidates: _Candidates) -> Iterator[Any]:
    """Batches like this one that tell the candidates apart which are left, each made when it is needed."""
    # The caller drops candidates between two turns of this generator: what it looks at changes while it runs.
    done: set[tuple[Path, int]] = set()
    if len(candidates.weightings) > 1:
        yield microbatch.value
    for weighting in list(candidates.weightings):
        key = (weighting.path, weighting.ignored)
        if weighting.kind in ("rows", "sum") or key in done:
            continue
        if weighting not in candidates.weightings:
            continue
        if len(candidates.weightings) == 1:
            return
        done.add(key)
        leaf = weighting.counted(microbatch.value)
        assert leaf is not None
        changed = _thinned(leaf, weighting)
        if changed is not None:
            yield _with_leaf(microbatch.value, leaf, changed)


def _thinned(leaf: Tensor, weighting: Weighting) -> Tensor | None:
    """``leaf`` with little that counts in the first half, and nothing at the beginning of rows of the second."""
    half = max(1, len(leaf) // 2)
    flat = leaf.clone().reshape(len(leaf), -1)
    if weighting.kind == "entries" and not _is_mask(leaf):
        if not leaf.is_floating_point():
            return None  # lengths: others would not fit to the rest
        flat[:half] *= 0.5
        return flat.reshape(leaf.shape)
    nothing = 0
    if weighting.kind == "labels":
        nothing = weighting.ignored
    if not _may_hold(leaf, weighting, nothing):
        return None
    counting = flat[flat != nothing]
    if counting.numel() == 0:
        return None
    valid = counting[0]
    if flat.shape[1] < 4:
        flat[: max(1, half - 1)] = nothing
        return flat.reshape(leaf.shape)
    # Of five columns (x counts, - does not), so that halves have other shares by rows, labels and shifted labels:
    #     first half   x x - - -
    #     second half  - x . . .    as they were from the third on
    first = torch.where(flat == nothing, valid, flat)
    flat[:half] = nothing
    flat[:half, :2] = first[:half, :2]
    flat[half:, 0] = nothing
    flat[half:, 1] = first[half:, 1]
    return flat.reshape(leaf.shape)


def _may_hold(leaf: Tensor, weighting: Weighting, value: int) -> bool:
    """Whether ``value`` can be put into ``leaf``: it is there, or the leaf is called so that it can only be labels.

    On an accelerator an index that is out of bounds ends the process; on a CPU it is an error that can be caught.
    """
    if weighting.kind == "entries" or leaf.device.type == "cpu":
        return True
    if bool((leaf == value).any()):
        return True
    name = _last_key(weighting.path)
    return "label" in name or "target" in name


def _with_leaf(value: Any, old: Tensor, new: Tensor) -> Any:
    def replaced(leaf: Any) -> Any:
        if leaf is old:
            return new
        return leaf

    return map_leaves(replaced, value)


# ---- what to say -----------------------------------------------------------------------------------------------------


def _wrong(microbatch: MicroBatch, trial: _Trial, may_be_whole: bool) -> str:
    mean = trial.predicted(Weighting())
    return (
        f"The loss of {microbatch.size} rows is {trial.whole:.6g}, but the mean of the losses of its two halves is "
        f"{mean:.6g}. So the loss of a batch is not the mean over its micro-batches, and "
        f"{_consequence(may_be_whole)}"
    )


def _wrong_gradient(microbatch: MicroBatch, misfit: Misfit, may_be_whole: bool) -> str:
    return (
        f"The loss of {microbatch.size} rows is made up by those of its two halves, but its gradient is not: that of "
        f"{misfit.parameter!r} is another by {misfit.error:.2g} of its size. So a part of the loss looks across rows "
        "or needs other weights than the rest (a balance of experts, a term between rows, a penalty beside a mean over "
        f"labels), and {_consequence(may_be_whole)}"
    )


def _consequence(may_be_whole: bool) -> str:
    if may_be_whole:
        return (
            "each batch runs as one micro-batch: right, but without overlap of stages, and with the memory of the "
            "whole batch. A num_microbatches that you give is used, with other numbers than those of one process."
        )
    return (
        "training with micro-batches is not quite training with the batch, just as with gradient accumulation. Use "
        "fewer micro-batches, or num_microbatches=1, if it matters."
    )


def _uncertain(microbatch: MicroBatch, trial: _Trial, left: Sequence[Weighting]) -> str:
    texts = []
    for weighting in left[:3]:
        predicted = trial.predicted(weighting)
        texts.append(f"{predicted:.7g} by {weighting.describe()}")
    return (
        f"It could not be told by what losses of micro-batches are weighted: that of {microbatch.size} rows is "
        f"{trial.whole:.7g}, and those of its two halves make {', '.join(texts)}. The first is used. If it is another, "
        "training differs from one process: use num_microbatches=1, or let each micro-batch have as many."
    )
