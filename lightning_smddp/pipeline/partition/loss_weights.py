"""How much each micro-batch counts in the loss of its batch, and in means that a step logs: ``sum(w * loss) / sum(w)``.

A loss that is a mean over rows is the mean of its micro-batches' losses, weighted by their rows. A language model's
loss is usually a mean over tokens, of which padding (label -100) does not count: then weights are numbers of labels.
The user says which (``loss_weight=``), or one trial on the first batch does, see :func:`best_fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_smddp._compat.torch import write_count
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, place_text
from lightning_smddp.wire.pytree import Path, items

IGNORED = -100  # torch's and transformers' label of what does not count
EXACT, MIXED = 1e-4, 1e-2  # relative errors that rounding may explain, in fp32 and with 16-bit types
_SAME = 3e-7  # relative errors that differ by less are equal

Kind: TypeAlias = Literal["rows", "labels", "shifted_labels", "sum", "entry", "function"]
Option: TypeAlias = str | Callable[[Any], Any]
"""``"auto"``, ``"rows"``, ``"labels"``, ``"shifted_labels"``, ``"sum"``, the name of a batch entry, or a function."""


@dataclass(frozen=True)
class LossWeight:
    """Weights of micro-batches.

    Attributes:
        kind: "rows"; "labels" that are not -100 in the batch's tensor at ``path``; "shifted_labels", the same without
            the first column; "sum": losses are added up; "entry": the sum of the tensor at ``path``; "function".
        path: keys and positions from the outside in.
        function: gives a micro-batch's weight.
    """

    kind: Kind = "rows"
    path: Path = ()
    function: Callable[[Any], Any] | None = field(default=None, compare=False)

    def apply(self, microbatches: Sequence[MicroBatch], on_host: Any = None) -> list[MicroBatch]:
        """The same micro-batches with these weights; by rows where there is no such tensor, or nothing counts.

        Args:
            microbatches: of one batch.
            on_host: the batch before it was moved to a device and cut by rows, if that is known.

        Raises:
            ValueError: the user's function returned no weight.
        """
        if self.kind == "rows" or len(microbatches) == 1:
            return list(microbatches)
        if self.kind == "sum":
            return [replace(microbatch, weight=1.0) for microbatch in microbatches]
        if self.function is not None:
            counts = [_weight_of(self.function(microbatch.value)) for microbatch in microbatches]
        else:
            found = self._counted(microbatches, self.counted(on_host))
            # One stacked tensor, and so at most one wait for a device, however many micro-batches there are.
            counts = torch.stack([self.count(tensor) for tensor in found]).tolist() if found else []
        total = sum(counts)
        if not total > 0:
            return list(microbatches)
        return [replace(part, weight=count / total) for part, count in zip(microbatches, counts, strict=True)]

    def _counted(self, microbatches: Sequence[MicroBatch], on_host: Tensor | None) -> Sequence[Tensor]:
        """The tensor at ``path`` of each micro-batch, or the same on the host; nothing if one has none."""
        found = [self.counted(microbatch.value) for microbatch in microbatches]
        there = [tensor for tensor in found if tensor is not None]
        if len(there) < len(found):
            return []
        sizes = [len(tensor) for tensor in there]
        is_moved = on_host is not None and sum(sizes) == len(on_host)
        if is_moved and not any(tensor.is_inference() or write_count(tensor) for tensor in there):
            assert on_host is not None
            return torch.split(on_host, sizes)
        return there

    def counted(self, value: Any) -> Tensor | None:
        """The tensor at ``path`` in a batch, if there is one with rows."""
        for path, leaf in items(value):
            if path == self.path and isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf
        return None

    def count(self, leaf: Tensor) -> Tensor:
        """What a tensor of labels, or an entry, counts: a scalar on its device."""
        if self.kind == "entry":
            return leaf.sum(dtype=torch.float64)
        if self.kind == "shifted_labels":
            leaf = leaf[:, 1:]
        return (leaf != IGNORED).sum(dtype=torch.float64)

    def describe(self) -> str:
        """For the table and for messages."""
        place = place_text(self.path)
        texts = {
            "rows": "rows",
            "labels": f"labels that are not {IGNORED} in {place}",
            "shifted_labels": f"labels that are not {IGNORED} in {place} without its first column",
            "sum": "none: losses are added up",
            "entry": f"the sum of {place}",
            "function": "by the function that was given as loss_weight",
        }
        return texts[self.kind]

    def to_json(self) -> Any:
        """Strings and lists, as a checkpoint keeps them."""
        return {"kind": self.kind, "path": list(self.path)}

    @classmethod
    def from_json(cls, data: Any) -> LossWeight:
        """The inverse of :meth:`to_json`."""
        return cls(data["kind"], tuple(data["path"]))


def _weight_of(value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"The function given as loss_weight returned {value!r} for a micro-batch. It has to return how much that "
            "counts: a number from 0."
        )
    return weight


def require_loss_weight(option: Any) -> None:
    """Raise ``ValueError`` if it is none of the values that ``loss_weight`` can have."""
    if callable(option) or (isinstance(option, str) and option):
        return
    raise ValueError(
        f"loss_weight={option!r} is unknown. Valid: 'auto', 'rows', 'labels', 'shifted_labels', 'sum', the name of an "
        "entry of the batch (its sum counts, as of a mask), or a function that is given a micro-batch and returns how "
        "much it counts."
    )


def given_weight(option: Option, batch: Any) -> LossWeight | None:
    """What ``loss_weight=option`` means for batches like this; None for ``"auto"``.

    Raises:
        ValueError: the batch has no such entry, or no labels.
    """
    if callable(option):
        return LossWeight("function", function=option)
    if option == "auto":
        return None
    if option == "rows":
        return LossWeight()
    if option == "sum":
        return LossWeight("sum")
    if option in ("labels", "shifted_labels"):
        found = [weight for weight in _of_labels(batch, named=True) if weight.kind == option]
    else:
        found = [LossWeight("entry", path) for path, _ in _tensors(batch) if path and str(path[-1]) == option]
    if found:
        return found[0]
    shown = [f"{place_text(path)}: {leaf.dtype}, {list(leaf.shape)}" for path, leaf in _tensors(batch)]
    raise ValueError(
        f"loss_weight={option!r} does not fit the batch, which has {'; '.join(shown) or 'no tensor with rows'}. Valid: "
        "the name of an entry, or a function that is given a micro-batch; 'labels' and 'shifted_labels' need a tensor "
        f"of integers that is called `labels` or has labels of {IGNORED} in it (the latter one of two dimensions)."
    )


def candidates(batch: Any) -> list[LossWeight]:
    """What ``"auto"`` chooses from, the most specific first."""
    return [*_of_labels(batch, named=False), LossWeight(), LossWeight("sum")]


def _of_labels(batch: Any, named: bool) -> list[LossWeight]:
    """Shifted labels, then labels. With ``named`` a tensor ``labels`` of one dimension counts, too."""
    shifted, plain = [], []
    for path, leaf in _tensors(batch):
        if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool:
            continue
        is_called_so = bool(path) and path[-1] == "labels" and (named or leaf.dim() > 1)
        if not is_called_so and not has_ignored(leaf):
            continue
        if leaf.dim() > 1 and leaf.shape[1] > 1:
            shifted.append(LossWeight("shifted_labels", path))
        plain.append(LossWeight("labels", path))
    return shifted + plain


def has_ignored(leaf: Tensor) -> bool:
    """Whether a tensor has labels that do not count."""
    return leaf.dtype in (torch.int64, torch.int32, torch.int16) and bool((leaf == IGNORED).any())


def _tensors(batch: Any) -> Iterator[tuple[Path, Tensor]]:
    for path, leaf in items(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            yield path, leaf


def best_fit(
    found: Sequence[LossWeight],
    whole: tuple[float, float],
    losses: Sequence[float],
    microbatches: Sequence[MicroBatch],
    tolerance: float,
) -> tuple[LossWeight, str | None]:
    """Which weights make the micro-batches' losses the batch's: those with the smallest error.

    Args:
        found: to choose from, the most specific first. Of those that err alike the first is chosen.
        whole: the loss of the batch, twice with different random numbers. If they differ, nothing can be said: rows.
        losses: of the micro-batches.
        microbatches: with weights by rows.
        tolerance: ``EXACT`` or ``MIXED``.

    Returns:
        The weights; and, if none is right, both numbers and the cure for the table.
    """
    expected, again = whole
    scale = max(map(abs, [expected, *losses, 1e-8]))
    if not math.isfinite(expected) or abs(expected - again) > 0.01 * tolerance * scale:
        return LossWeight(), None
    errors = []
    for weight in found:
        predicted = 0.0
        for part, loss in zip(weight.apply(microbatches), losses, strict=True):
            if part.weight:  # else the loss is NaN where it is a mean over no labels
                predicted += part.weight * loss
        error = abs(predicted - expected) / scale
        errors.append(error if math.isfinite(error) else math.inf)
    smallest = min(errors)
    if smallest <= tolerance:
        return next(weight for weight, error in zip(found, errors, strict=True) if error <= smallest + _SAME), None
    by_rows = sum(part.weight * loss for part, loss in zip(microbatches, losses, strict=True))
    return LossWeight(), (
        f"the loss of the first batch is {expected:.6g}, that of its micro-batches by rows {by_rows:.6g}, and no other "
        "weights fit: the loss looks across rows, or needs weights of its own. Give loss_weight=, or num_microbatches=1"
    )
