"""How much each micro-batch's loss counts: by its rows, its labels, the entries of a mask, or as it is.

A loss that is a mean over rows is the mean of its micro-batches' losses, weighted by their rows. A language model's
loss is usually a mean over tokens, of which padding (label -100) does not count: then the weights are numbers of
labels. Which weights are right is found out by ``weight_trials.py``; :class:`LossCalls` notes which targets torch's own
classification losses were called with.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_smddp.communication.host_numbers import from_numbers
from lightning_smddp.pipeline.partition.batch_structure import place_text
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.host_values import HostOf
from lightning_smddp.wire.pytree import Path, items

IGNORED = -100  # torch's and transformers' label of what does not count
Kind: TypeAlias = Literal["rows", "labels", "entries", "sum"]

# Of the losses that are watched: a call's labels and class weights are found by name, however they were given.
_SIGNATURES = {
    functional.cross_entropy: inspect.signature(functional.cross_entropy),
    functional.nll_loss: inspect.signature(functional.nll_loss),
}


@dataclass(frozen=True)
class Weighting:
    """Weights of micro-batches.

    Attributes:
        kind: "rows"; "labels" that count, or the sum of "entries" (of a mask, of lengths) in the batch's tensor at
            ``path``; "sum": losses are added up.
        path: keys and positions from the outside in.
        skip: labels at the beginning of each row that are never predicted (1 where the step shifts labels); -1 for the
            last one.
        ignored: the label that does not count.
        class_weights: by label, how much one counts; empty if all count alike.
        fits: False if no weights make the losses of micro-batches the batch's.
    """

    kind: Kind = "rows"
    path: Path = ()
    skip: int = 0
    ignored: int = IGNORED
    class_weights: tuple[float, ...] = ()
    fits: bool = field(default=True, compare=False)

    def apply(self, microbatches: Sequence[MicroBatch], host_of: HostOf | None = None) -> list[MicroBatch]:
        """The same micro-batches with these weights; by rows where there is no such tensor, or nothing counts.

        Args:
            microbatches: of one batch.
            host_of: where values on a device are looked up. What is not known there is asked of the device: once.
        """
        if self.kind == "rows" or len(microbatches) == 1:
            return list(microbatches)
        if self.kind == "sum":
            return [replace(microbatch, weight=1.0) for microbatch in microbatches]
        tensors = []
        for microbatch in microbatches:
            tensor = self.counted(microbatch.value)
            if tensor is None:
                return list(microbatches)
            tensors.append(tensor)
        if host_of is not None:
            tensors = _on_host(tensors, host_of)
        # One stacked tensor, and so at most one wait for a device, however many micro-batches there are.
        stacked = torch.stack([self._count(tensor) for tensor in tensors])
        counts: list[float] = stacked.tolist()
        total = sum(counts)
        if not total > 0:
            return list(microbatches)
        weighted = []
        for microbatch, count in zip(microbatches, counts, strict=True):
            weighted.append(replace(microbatch, weight=count / total))
        return weighted

    def count(self, value: Any) -> Tensor | None:
        """What a micro-batch counts, a scalar on its device; None if it has no such tensor."""
        tensor = self.counted(value)
        if tensor is None:
            return None
        return self._count(tensor)

    def counted(self, value: Any) -> Tensor | None:
        """The tensor at ``path``, if there is one with rows."""
        for path, leaf in items(value):
            if path != self.path:
                continue
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf
            return None
        return None

    def _count(self, leaf: Tensor) -> Tensor:
        if leaf.dim() > 1 and self.skip > 0:
            leaf = leaf[:, self.skip :]
        elif leaf.dim() > 1 and self.skip < 0:
            leaf = leaf[:, : self.skip]
        if self.kind == "entries":
            return leaf.sum(dtype=torch.float64)
        counts = leaf != self.ignored
        if not self.class_weights:
            return counts.sum(dtype=torch.float64)
        # Ignored labels (-100) are no indices: class 0 is looked up in their place, and its weight then left out.
        weight_by_class = from_numbers(self.class_weights, torch.float64, leaf.device)
        weights = weight_by_class[leaf.where(counts, 0)]
        return weights.where(counts, 0.0).sum()

    def describe(self) -> str:
        """For the table and for messages."""
        shifted = {0: "", 1: ", shifted by one", -1: ", without the last"}[self.skip]
        if self.kind == "labels":
            text = f"labels that are not {self.ignored} in {place_text(self.path)}{shifted}"
            if self.class_weights:
                text += ", by their classes' weights"
            return text
        if self.kind == "entries":
            return f"the sum of {place_text(self.path)}{shifted}"
        if self.kind == "rows":
            return "rows"
        return "none: losses are added up"

    def to_json(self) -> Any:
        """Numbers, strings and lists, as a checkpoint keeps them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Weighting:
        """The inverse of :meth:`to_json`, which leaves lists where tuples were."""
        given = dict(data)
        given["path"] = tuple(data["path"])
        given["class_weights"] = tuple(data["class_weights"])
        return cls(**given)


def _on_host(tensors: list[Tensor], host_of: HostOf) -> list[Tensor]:
    """The same tensors on the host if it knows all of them, else as they are: a stack has to be of one device."""
    found = []
    for tensor in tensors:
        here = host_of(tensor)
        if here is None:
            return tensors
        found.append(here)
    return found


def warning_without_trial(microbatch: MicroBatch, why: str) -> str | None:
    """What to say where nothing can be compared, if the rows have labels that do not count."""
    for path, leaf in items(microbatch.value):
        if not isinstance(leaf, Tensor) or leaf.dtype != torch.int64:
            continue
        has_ignored = bool((leaf == IGNORED).any())
        if has_ignored:
            return (
                f"{place_text(path)} has labels of {IGNORED}, which do not count in most losses, and micro-batches "
                f"are weighted by their rows: {why} nothing else can be tried out. If "
                "the loss is a mean over labels, let each micro-batch have as many, or use num_microbatches=1."
            )
    return None


@dataclass(frozen=True)
class LossCall:
    """A mean of ``cross_entropy`` or ``nll_loss`` over labels: a copy of them, and what says how much each counts."""

    target: Tensor
    ignored: int
    class_weights: tuple[float, ...]

    def weightings(self, value: Any) -> Iterator[Weighting]:
        """Where in a batch the labels came from."""
        for path, leaf in items(value):
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                continue
            if leaf.is_floating_point():
                continue
            # As the batch has them, shifted by one (each position predicts the next), or without the last.
            for skip in (0, 1, -1):
                is_origin = any(_same_labels(self.target, part) for part in self._shifted(leaf, skip))
                if is_origin:
                    yield Weighting("labels", path, skip, self.ignored, self.class_weights)

    def _shifted(self, leaf: Tensor, skip: int) -> Iterator[Tensor]:
        """What a step may make of labels before it calls the loss: shorter ones, or padded with what does not count."""
        if skip == 0:
            yield leaf
            return
        if leaf.dim() != 2 or leaf.shape[1] < 2:
            return
        # Of a row of labels a b c d, with `-` for one that does not count: b c d or b c d -; a b c or - a b c.
        filler = leaf.new_full((len(leaf), 1), self.ignored)
        if skip == 1:
            without_first = leaf[:, 1:]
            yield without_first
            yield torch.cat([without_first, filler], 1)
        else:
            without_last = leaf[:, :-1]
            yield without_last
            yield torch.cat([filler, without_last], 1)


class LossCalls(TorchFunctionMode):
    """Collects the calls of classification losses while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[LossCall] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _SIGNATURES.get(function)
        if signature is not None:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            self._note(given.arguments)
        return function(*args, **kwargs)

    def _note(self, given: dict[str, Any]) -> None:
        target = given["target"]
        weight = given["weight"]
        if target.is_floating_point() or given["reduction"] != "mean":  # probabilities; or others take the mean
            return
        class_weights: tuple[float, ...] = ()
        if weight is not None:
            class_weights = tuple(weight.detach().double().tolist())
        # A copy: the step may write into its labels behind the call.
        labels = target.detach().clone()
        self.found.append(LossCall(labels, given["ignore_index"], class_weights))


def _same_labels(target: Tensor, part: Tensor) -> bool:
    if target.numel() != part.numel():
        return False
    return torch.equal(target.flatten().to(part.dtype), part.flatten())
