"""How much each micro-batch's loss counts: by its rows, or by its labels that count.

A loss that is a mean over rows is the mean of its micro-batches' losses, weighted by their rows. A language model's
loss is usually a mean over tokens, of which padding (label -100) does not count: then the weights are numbers of
labels. Found out by comparing, on rows of the first batch, the loss of two micro-batches joined with those of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.pipeline.microbatches import MicroBatch, split
from lightning_smddp.pipeline.structure import Path, items, map_leaves

IGNORED = -100  # torch's and transformers' label of what does not count
_TOLERANCE = 1e-4  # relative; rounding is less, a wrong weight is more


@dataclass(frozen=True)
class Weighting:
    """Weights of micro-batches: by rows (``path`` is None), or by labels in the batch's tensor at ``path``.

    Attributes:
        path: keys and positions from the outside in.
        skip: labels at the beginning of each row that are never predicted (1 where the step shifts labels).
    """

    path: Path | None = None
    skip: int = 0

    def apply(self, microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The same micro-batches with these weights."""
        if self.path is None or len(microbatches) == 1:
            return list(microbatches)
        counts = [self._count(microbatch.value) for microbatch in microbatches]
        total = sum(counts)
        if total == 0:
            return list(microbatches)
        return [replace(m, weight=count / total) for m, count in zip(microbatches, counts, strict=True)]

    def describe(self) -> str:
        """For the table."""
        if self.path is None:
            return "rows"
        return f"labels that are not {IGNORED} in batch{_text(self.path)}" + (", shifted by one" if self.skip else "")

    def _count(self, value: Any) -> int:
        labels = next(leaf for path, leaf in items(value) if path == self.path)
        return int((labels[:, self.skip :] != IGNORED).sum())

    def to_json(self) -> Any:
        """Plain data."""
        return {"path": None if self.path is None else list(self.path), "skip": self.skip}

    @classmethod
    def from_json(cls, data: Any) -> Weighting:
        """The inverse."""
        return cls(None if data["path"] is None else tuple(data["path"]), data["skip"])


def find_weighting(loss_of: Callable[[MicroBatch], float], microbatch: MicroBatch) -> tuple[Weighting, str | None]:
    """Which weights make micro-batches' losses the batch's.

    Args:
        loss_of: runs the step, without random effects on the model.
        microbatch: some rows of a batch, at least two.

    Returns:
        The weighting, and a warning if none is right.
    """
    parts = split(microbatch.value, 2)
    if len(parts) < 2:
        return Weighting(), None
    whole = loss_of(microbatch)
    if not _close(whole, loss_of(microbatch)):
        return Weighting(), None  # random: nothing can be compared
    by_labels = _by_labels(loss_of, microbatch)
    if by_labels is not None:
        return by_labels, None
    losses = [loss_of(part) for part in parts]
    mean = sum(part.weight * loss for part, loss in zip(parts, losses, strict=True))
    if _close(whole, mean):
        return Weighting(), None
    return Weighting(), (
        f"The loss of {microbatch.size} rows is {whole:.6g}, but the mean of the losses of its two halves is "
        f"{mean:.6g}. So the loss of a batch is not the mean over its micro-batches, and training with micro-batches "
        "is not quite training with the batch, just as with gradient accumulation. Use fewer micro-batches, or "
        "num_microbatches=1, if it matters."
    )


def warning_without_trial(microbatch: MicroBatch) -> str | None:
    """What to say where nothing can be compared, if the rows have labels that do not count."""
    for path, leaf in items(microbatch.value):
        if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and bool((leaf == IGNORED).any()):
            return (
                f"batch{_text(path)} has labels of {IGNORED}, which do not count in most losses, and micro-batches are "
                "weighted by their rows: with a model that is never whole on a rank nothing else can be tried out. If "
                "the loss is a mean over labels, let each micro-batch have as many, or use num_microbatches=1."
            )
    return None


def _by_labels(loss_of: Callable[[MicroBatch], float], microbatch: MicroBatch) -> Weighting | None:
    """Take labels out of the first half, and see what the loss does with it."""
    for path, leaf in items(microbatch.value):
        if not (isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.dtype == torch.int64 and _is_label(path, leaf)):
            continue
        labels = leaf.clone()
        rows, length = max(1, microbatch.size // 2), labels.shape[1]
        if length < 4 or labels.shape[0] != microbatch.size:
            continue
        labels[:rows, length // 2 :] = IGNORED
        changed = MicroBatch(_with_leaf(microbatch.value, leaf, labels), microbatch.size, 1.0)
        whole, parts = loss_of(changed), split(changed.value, 2)
        losses = [loss_of(part) for part in parts]
        for skip in (0, 1):
            weighting = Weighting(path, skip)
            weighted = zip(weighting.apply(parts), losses, strict=True)
            if _close(whole, sum(part.weight * loss for part, loss in weighted)):
                return weighting
    return None


def _is_label(path: Path, leaf: Tensor) -> bool:
    """Named as labels are, or already with some that do not count: only then is it safe to put more there."""
    name = str(path[-1]).lower() if path else ""
    return "label" in name or "target" in name or bool((leaf == IGNORED).any())


def _with_leaf(value: Any, old: Tensor, new: Tensor) -> Any:
    return map_leaves(lambda leaf: new if leaf is old else leaf, value)


def _close(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return False
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other), 1e-8)


def _text(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
