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
from lightning_smddp.pipeline.partition.microbatches import MicroBatch
from lightning_smddp.pipeline.runtime.host_values import HostOf
from lightning_smddp.wire.pytree import Path, items

IGNORED = -100  # torch's and transformers' label of what does not count
Kind: TypeAlias = Literal["rows", "labels", "entries", "sum"]

_SIGNATURES = {function: inspect.signature(function) for function in (functional.cross_entropy, functional.nll_loss)}


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
        leaves = []
        for microbatch in microbatches:
            leaf = self._counted(microbatch.value)
            if leaf is None:
                return list(microbatches)
            leaves.append(leaf)
        if host_of is not None:
            on_host = [here for leaf in leaves if (here := host_of(leaf)) is not None]
            if len(on_host) == len(leaves):
                leaves = on_host
        counts: list[float] = torch.stack([self._count(leaf) for leaf in leaves]).tolist()
        total = sum(counts)
        if not total > 0:
            return list(microbatches)
        return [replace(m, weight=count / total) for m, count in zip(microbatches, counts, strict=True)]

    def count(self, value: Any) -> Tensor | None:
        """What a micro-batch counts, a scalar on its device; None if it has no such tensor."""
        leaf = self._counted(value)
        if leaf is None:
            return None
        return self._count(leaf)

    def _counted(self, value: Any) -> Tensor | None:
        """The tensor at ``path``, if there is one with rows."""
        leaf = next((leaf for path, leaf in items(value) if path == self.path), None)
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return None
        return leaf

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
        weights = from_numbers(self.class_weights, torch.float64, leaf.device)
        return weights[leaf.where(counts, 0)].where(counts, 0.0).sum()

    def describe(self) -> str:
        """For the table and for messages."""
        shifted = {0: "", 1: ", shifted by one", -1: ", without the last"}[self.skip]
        if self.kind == "labels":
            text = f"labels that are not {self.ignored} in batch{path_text(self.path)}{shifted}"
            if self.class_weights:
                text += ", by their classes' weights"
            return text
        if self.kind == "entries":
            return f"the sum of batch{path_text(self.path)}{shifted}"
        if self.kind == "rows":
            return "rows"
        return "none: losses are added up"

    def to_json(self) -> Any:
        """Numbers, strings and lists, as a checkpoint keeps them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Weighting:
        """The inverse of :meth:`to_json`, which leaves lists where tuples were."""
        return cls(**{**data, "path": tuple(data["path"]), "class_weights": tuple(data["class_weights"])})


def warning_without_trial(microbatch: MicroBatch, why: str) -> str | None:
    """What to say where nothing can be compared, if the rows have labels that do not count."""
    for path, leaf in items(microbatch.value):
        if isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and bool((leaf == IGNORED).any()):
            return (
                f"batch{path_text(path)} has labels of {IGNORED}, which do not count in most losses, and micro-batches "
                f"are weighted by their rows: {why} nothing else can be tried out. If "
                "the loss is a mean over labels, let each micro-batch have as many, or use num_microbatches=1."
            )
    return None


def path_text(path: Path) -> str:
    """Keys and positions as Python code has them."""
    return "".join(f"[{key!r}]" for key in path)


@dataclass(frozen=True)
class LossCall:
    """A mean of ``cross_entropy`` or ``nll_loss`` over labels: a copy of them, and what says how much each counts."""

    target: Tensor
    ignored: int
    class_weights: tuple[float, ...]

    def weightings(self, value: Any) -> Iterator[Weighting]:
        """Where in a batch the labels came from."""
        for path, leaf in items(value):
            if not isinstance(leaf, Tensor) or leaf.is_floating_point() or not leaf.dim() > 0:
                continue
            for skip in (0, 1, -1):
                if any(_same_labels(self.target, part) for part in self._shifted(leaf, skip)):
                    yield Weighting("labels", path, skip, self.ignored, self.class_weights)

    def _shifted(self, leaf: Tensor, skip: int) -> Iterator[Tensor]:
        """What a step may make of labels before it calls the loss: shorter ones, or padded with what does not count."""
        if skip == 0:
            yield leaf
            return
        if leaf.dim() != 2 or leaf.shape[1] < 2:
            return
        filler = leaf.new_full((len(leaf), 1), self.ignored)
        if skip == 1:
            yield leaf[:, 1:]
            yield torch.cat([leaf[:, 1:], filler], 1)
        else:
            yield leaf[:, :-1]
            yield torch.cat([filler, leaf[:, :-1]], 1)


class LossCalls(TorchFunctionMode):
    """Collects the calls of classification losses while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[LossCall] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        signature = _SIGNATURES.get(function)
        if signature is not None:
            given = signature.bind(*args, **(kwargs or {}))
            given.apply_defaults()
            self._note(given.arguments)
        return function(*args, **(kwargs or {}))

    def _note(self, given: dict[str, Any]) -> None:
        target, weight = given["target"], given["weight"]
        if target.is_floating_point() or given["reduction"] != "mean":  # probabilities; or others take the mean
            return
        weights: tuple[float, ...] = ()
        if weight is not None:
            weights = tuple(weight.detach().double().tolist())
        self.found.append(LossCall(target.detach().clone(), given["ignore_index"], weights))


def _same_labels(target: Tensor, part: Tensor) -> bool:
    return target.numel() == part.numel() and torch.equal(target.flatten().to(part.dtype), part.flatten())
