"""How much each micro-batch counts in the loss of its batch, and in means that a step logs: ``sum(w * loss) / sum(w)``.

A loss that is a mean over rows is the mean of its micro-batches' losses, weighted by their rows. A language model's
loss is usually a mean over tokens, of which padding (label -100) does not count: then weights are numbers of labels.
The user says which (``loss_weight=``), or one trial of the first batch against its micro-batches does, forward only and
in eval mode: see :func:`find_loss_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_smddp._compat.torch import write_count
from lightning_smddp.bridge.step import LightningStep, loss_of
from lightning_smddp.communication.objects import broadcast
from lightning_smddp.pipeline.capture.preserve_state import preserve_state
from lightning_smddp.pipeline.partition.microbatches import MicroBatch, MicroBatches, place_text, rows_of, shown
from lightning_smddp.pipeline.partition.plan import own_error
from lightning_smddp.pytree import Path, items

if TYPE_CHECKING:
    from lightning_smddp.bridge.partitioned_module import PartitionedModule

IGNORED = -100  # torch's and transformers' label of what does not count
EXACT, MIXED = 1e-4, 1e-2  # relative errors that rounding may explain, in fp32 and with 16-bit types
_SAME = 3e-7  # relative errors that differ by less are equal
_SEEDS = (20240229, 20250131)  # of the whole batch: a loss that follows them is chance

Kind: TypeAlias = Literal["rows", "labels", "shifted_labels", "sum", "entry", "function"]


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

    def apply(self, microbatches: MicroBatches, on_host: Any = None) -> MicroBatches:
        """The same micro-batches with these weights; by rows where there is no such tensor, or nothing counts.

        Args:
            microbatches: of one batch.
            on_host: the batch before it was moved to a device and cut by rows, if that is known.

        Raises:
            ValueError: the user's function returned no weight.
        """
        if self.kind == "rows" or len(microbatches) == 1:
            return microbatches
        if self.kind == "sum":
            return [replace(microbatch, weight=1.0) for microbatch in microbatches]
        if self.function is not None:
            counts = [_weight_of(self.function(microbatch.value)) for microbatch in microbatches]
        else:
            counts = self._counts([microbatch.value for microbatch in microbatches], on_host)
        total = sum(counts)
        if not total > 0:
            return microbatches
        return [replace(part, weight=count / total) for part, count in zip(microbatches, counts, strict=True)]

    def of(self, batch: Any) -> Tensor:
        """What a whole batch weighs against those of other ranks: a scalar, on the device of what is counted.

        Raises:
            ValueError: the user's function returned no weight, or the batch has no such tensor.
        """
        if self.function is not None:
            return torch.tensor(_weight_of(self.function(batch)))
        if self.kind == "rows":
            return torch.tensor(float(rows_of(batch)))
        counted = _tensors(batch).get(self.path)
        if counted is None:
            raise ValueError(f"loss_weight: there is no {place_text(self.path)} in {shown(batch)}.")
        return self._count(counted)

    def _counts(self, values: Sequence[Any], on_host: Any) -> list[float]:
        """What the tensor at ``path`` counts in each micro-batch; nothing if one has none."""
        found = [_tensors(value).get(self.path) for value in values]
        there = [tensor for tensor in found if tensor is not None]
        if len(there) < len(found):
            return []
        # The same on the host, where nothing waits for a device, unless a hook has cut or written what was moved.
        whole, sizes = _tensors(on_host).get(self.path), [len(tensor) for tensor in there]
        is_moved = whole is not None and len(whole) == sum(sizes)
        if is_moved and not any(tensor.is_inference() or write_count(tensor) for tensor in there):
            there = list(whole.split(sizes))  # type: ignore[union-attr]
        # One stacked tensor, and so at most one wait for a device, however many micro-batches there are.
        return torch.stack([self._count(tensor) for tensor in there]).tolist()

    def _count(self, leaf: Tensor) -> Tensor:
        """What a tensor of labels, or an entry, counts: a scalar on its device."""
        if self.kind == "shifted_labels":
            leaf = leaf[:, 1:]
        counted = leaf if self.kind == "entry" else leaf != IGNORED
        return counted.sum(dtype=torch.float64)

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


Found: TypeAlias = tuple[LossWeight, str | None]
"""Weights, and what the table says where none was found to be right."""


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


def given_weight(option: str | Callable[[Any], Any], batch: Any, before: LossWeight | None = None) -> LossWeight | None:
    """What ``loss_weight=option`` means for batches like this; None for ``"auto"``.

    Args:
        option: the user's.
        batch: that is to be weighed.
        before: what it meant for a batch before. The tensor that was counted there is counted here, if there is one:
            this batch may have no label of -100 by which labels are known.

    Raises:
        ValueError: the batch has no such entry, or no labels.
    """
    if before is not None and before.path in _tensors(batch):
        return before
    if callable(option):
        return LossWeight("function", function=option)
    if option == "auto":
        return None
    if option == "rows":
        return LossWeight()
    if option == "sum":
        return LossWeight("sum")
    if option in ("labels", "shifted_labels"):
        found = [weight for weight in labels_of(batch, named=True) if weight.kind == option]
    else:
        found = [LossWeight("entry", path) for path in _tensors(batch) if path and str(path[-1]) == option]
    if found:
        return found[0]
    raise ValueError(
        f"loss_weight={option!r} does not fit the batch, which is {shown(batch)}. Valid: the name of an entry with "
        "rows, or a function that is given a micro-batch; 'labels' and 'shifted_labels' need a tensor of integers that "
        f"is called `labels` or has labels of {IGNORED} in it (the latter one of two dimensions)."
    )


def candidates(batch: Any) -> list[LossWeight]:
    """What ``"auto"`` chooses from, the most specific first."""
    return [*labels_of(batch), LossWeight(), LossWeight("sum")]


def labels_of(batch: Any, named: bool = False) -> list[LossWeight]:
    """Weights by labels: shifted ones, then plain. With ``named`` a tensor ``labels`` of one dimension counts, too."""
    shifted, plain = [], []
    for path, leaf in _tensors(batch).items():
        if leaf.dtype not in (torch.int64, torch.int32, torch.int16):
            continue
        is_called_so = path[-1:] == ("labels",) and (named or leaf.dim() > 1)
        if is_called_so or bool((leaf == IGNORED).any()):
            plain.append(LossWeight("labels", path))
            if leaf.dim() > 1 and leaf.shape[1] > 1:
                shifted.append(LossWeight("shifted_labels", path))
    return shifted + plain


def _tensors(batch: Any) -> dict[Path, Tensor]:
    """Those with rows, by place."""

    def has_rows(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested and leaf.dim() > 0

    return {path: leaf for path, leaf in items(batch) if has_rows(leaf)}


# ---- the trial -------------------------------------------------------------------------------------------------------


def find_loss_weight(
    partitioned: PartitionedModule,
    step: LightningStep,
    whole: MicroBatch,
    microbatches: MicroBatches,
) -> Found:
    """What makes the micro-batches' losses the batch's, through the pipeline. Collective over all ranks.

    Args:
        partitioned: the module.
        step: whose loss.
        whole: the first batch.
        microbatches: that it was cut into, weighted by rows.

    Returns:
        The weights, the same on all ranks, and a row for the table where none was found to be right.
    """
    setup = partitioned.setup
    trial = step.unscaled(trains=False)
    outputs: list[Any] = []  # of the whole batch, twice, and of each micro-batch, where the step ends
    try:
        for number, parts in enumerate(([whole], [whole], microbatches)):
            with preserve_state(setup.module, setup.device), torch.no_grad():
                setup.module.eval()
                trial.seed = _SEEDS[number % 2]
                outputs += partitioned.trial(trial, parts)
        # Only now: what this rank alone may raise would leave the others in the next run.
        losses = [float(loss_of(output, trial.hook, detached=True)) for output in outputs]
        tolerance = EXACT if partitioned.plan.is_exact else MIXED
        found = best_fit(candidates(whole.value), losses, microbatches, tolerance)
    except Exception as error:  # on every rank: the step is not made for eval mode, or whole batches are too large
        text = f"micro-batches count by rows, as the step fails in eval mode on a batch: {own_error(error)!r}"
        found = LossWeight(), text
    # Replicas have other batches: all of them take part, and the first one's batch decides.
    return broadcast(found, group_src=setup.groups.mesh.pipelines[0][setup.last_rank])  # type: ignore[no-any-return]


def best_fit(
    found: Sequence[LossWeight],
    losses: Sequence[float],
    microbatches: MicroBatches,
    tolerance: float,
) -> Found:
    """Which weights make the micro-batches' losses the batch's: those with the smallest error.

    Args:
        found: to choose from, the most specific first. Of those that err alike the first is chosen.
        losses: of the batch, twice with different random numbers, and of its micro-batches; empty where the step does
            not end. If the first two differ, nothing can be said: rows.
        microbatches: with weights by rows.
        tolerance: ``EXACT`` or ``MIXED``.

    Returns:
        The weights; and, if none is right, both numbers and the cure for the table.
    """
    expected, again, *rest = losses or (math.nan, math.nan)
    scale = max(map(abs, [*losses, 1e-8]))
    if not math.isfinite(expected) or abs(expected - again) > 0.01 * tolerance * scale:
        return LossWeight(), None
    predicted = {}
    for weight in found:
        pairs = zip(weight.apply(microbatches), rest, strict=True)
        predicted[weight] = sum(part.weight * loss for part, loss in pairs if part.weight)  # else NaN: no labels
    errors = {weight: abs(loss - expected) / scale for weight, loss in predicted.items() if math.isfinite(loss)}
    smallest = min(errors.values(), default=math.inf)
    if smallest <= tolerance:
        return next(weight for weight, error in errors.items() if error <= smallest + _SAME), None
    by_rows = predicted[LossWeight()]
    return LossWeight(), (
        f"the loss of the first batch is {expected:.6g}, that of its micro-batches by rows {by_rows:.6g}, and no other "
        "weights fit: the loss looks across rows, or needs weights of its own. Give loss_weight=, or num_microbatches=1"
    )
