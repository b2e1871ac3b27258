"""The same gradient whatever the number of ranks and of accumulated batches: batches count by what is in them.

Ranks' losses are averaged as if all batches counted alike. With padded texts they do not: a mean over 800 tokens on one
rank and one over 400 on another are not, on average, the mean over 1,200 (transformers' issues #34191 and #34242). So
before its backward pass a loss is scaled by what its batch weighs over the mean of all ranks' weights. The average is

    sum of (weight * loss) / sum of weights, over ranks and accumulated batches

then. Weights are those of a pipeline's micro-batches: ``bridge/loss_weights.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp._compat.trainer import will_step
from lightning_smddp.bridge.loss_weights import LossWeight, given_weight, labels_of
from lightning_smddp.communication.objects import gather
from lightning_smddp.sharding.optimizer_shards import local_of
from lightning_smddp.strategies.tables import say
from lightning_smddp.strategies.uneven import Join

_WORTH_A_LINE = 1e-3  # relative


class LossWeighting:
    """Scales the losses of a fit's training steps, on all ranks.

    Args:
        option: ``loss_weight`` as the user gave it; None: one line says what it would change, if it would.
        trainer: of the fit.
        join: knows whose batches weigh nothing; None: there are no such.
    """

    def __init__(self, option: Any, trainer: Any, join: Join | None = None) -> None:
        self._option = option
        self._join = join
        self._trainer = trainer
        self._looks = option is None and trainer.lightning_module.automatic_optimization  # until the first step
        self._batch: Any = None  # of that step
        self._counts: LossWeight | None = None
        self._weight = torch.ones(())  # of this rank's batch
        self._mean: Tensor  # of all ranks' batches, when `_arrival` is there
        self._arrival: dist.Work | None = None
        self._means: list[Tensor] = []  # of the batches whose gradients are added up

    def batch_starts(self, batch: Any, batch_idx: int) -> None:
        """Send what ``batch`` weighs; behind the first one nothing waits for it. Collective.

        Raises:
            ValueError: the batch does not have what was named.
        """
        if batch_idx % self._trainer.accumulate_grad_batches == 0:  # Lightning drops the gradients of before
            self._means.clear()
        if self._looks:
            self._batch = batch
        weight = torch.ones(())
        if self._option not in (None, "sum"):
            self._counts = self._counts or _agreed(self._option, batch)
            weight = self._counts.of(batch)
        elif self._join is None:
            return
        if self._join is not None:
            weight = weight * self._join.counts
        self._weight = weight.to(self._trainer.strategy.root_device, torch.float32)
        if self._option != "sum":  # which is over no mean
            self._mean = self._weight / dist.get_world_size()
            self._arrival = dist.all_reduce(self._mean, async_op=True)

    def scaled(self, loss: Tensor) -> Tensor:
        """``loss``, which Lightning has divided by the number of accumulated batches, for the backward pass."""
        accumulated = self._trainer.accumulate_grad_batches
        if self._looks:
            batch, self._looks, self._batch = self._batch, False, None
            say_difference(batch, loss.detach() * accumulated, self._trainer)
        if self._option is None and self._join is None:
            return loss
        if self._option == "sum":
            return torch.mul(loss, accumulated * dist.get_world_size() * self._weight)
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
            self._means.append(self._mean)
        # What batches to come weigh is not known: the first one's mean is the unit of all, until the last one.
        unit = _positive(self._means[0])
        # A mean over nothing is NaN, which would be everybody's.
        scaled: Tensor = torch.where(self._weight > 0, loss * (self._weight / unit), 0.0)
        return scaled

    def backward_ends(self) -> None:
        """Behind the last of accumulated batches: put gradients right, as all weights are known now."""
        accumulated = self._trainer.accumulate_grad_batches
        if accumulated == 1 or not self._means or not will_step(self._trainer):
            return
        # Without an option batches count alike, and Lightning divides by their full number at the end of an epoch, too.
        count = len(self._means) if self._option is None else accumulated
        factor = count * _positive(self._means[0]) / _positive(torch.stack(self._means).sum())
        for parameter in self._trainer.lightning_module.parameters():
            if parameter.grad is not None:
                gradient = local_of(parameter.grad)
                gradient.mul_(factor.to(gradient.device))


def _agreed(option: Any, batch: Any) -> LossWeight:
    """What ``option`` means for all ranks' batches: one of them may have no label by which to know labels. Collective.

    Raises:
        ValueError: on every rank: no batch has what was named.
    """
    if callable(option):
        return LossWeight("function", function=option)
    found, error = None, ""
    try:
        found = given_weight(option, batch)
    except ValueError as caught:
        error = str(caught)
    places = [place for place in gather(found and found.to_json()) if place is not None]
    if not places:
        raise ValueError(error)
    return LossWeight.from_json(places[0])


def _positive(weight: Tensor) -> Tensor:
    """``weight``, or one where nothing counts."""
    return torch.where(weight > 0, weight, 1.0)


def say_difference(batch: Any, loss: Tensor, trainer: Any) -> None:
    """Say what counting labels would make of the loss of all ranks' batches, if that is not the same. Collective.

    Args:
        batch: of this rank.
        loss: of its step.
        trainer: says it.
    """
    counted = [float(weight.of(batch)) for weight in labels_of(batch) if weight.kind == "labels"]
    found = gather((float(loss), *counted))
    if any(len(of_rank) != 2 for of_rank in found):  # this is no batch of padded labels
        return
    losses, numbers = zip(*found, strict=True)
    plain = sum(losses) / len(losses)
    weighted = sum(number * of_rank for of_rank, number in found) / max(1.0, sum(numbers))
    if abs(weighted - plain) > _WORTH_A_LINE * abs(plain) and trainer.is_global_zero:
        say(
            f"ranks' batches count alike, whatever labels they have: the first loss of all is {plain:.5g}, and were "
            f"{weighted:.5g} with CommunicationOptions(loss_weight='labels'), or 'shifted_labels' if the model shifts "
            "them",
            trainer,
        )
