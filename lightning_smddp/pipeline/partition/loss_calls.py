"""Which targets torch's own classification losses were called with, and which of them did not count."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_smddp.pipeline.partition.loss_weights import Weighting
from lightning_smddp.wire.pytree import items

_SIGNATURES = {function: inspect.signature(function) for function in (functional.cross_entropy, functional.nll_loss)}


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
                if any(_same(self.target, part) for part in self._shifted(leaf, skip)):
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


def _same(target: Tensor, part: Tensor) -> bool:
    return target.numel() == part.numel() and torch.equal(target.flatten().to(part.dtype), part.flatten())
