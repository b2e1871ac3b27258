"""Gradients between a schedule, which makes them early, and a Trainer, which zeroes and wants them later.

A schedule runs forward and backward of all micro-batches within `training_step`. Lightning zeroes gradients behind it,
and asks for them in `backward`::

    training_step: begin -> schedule makes .grad -> stash      .grad as it was before the batch
    zero_grad                                                  .grad as the Trainer wants it
    backward:      restore                                     .grad = what was there + what the schedule made
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.gradients.across_stages import TiedGradients


class Averaging(Protocol):
    """What a stash asks of ``ReplicaGradients``, which averages gradients over replicas."""

    def begin(self, backwards: int | Mapping[str, int] | None, keep: bool = False) -> None: ...  # noqa: D102
    def stash(self) -> None: ...  # noqa: D102
    def finish(self, average: bool = True) -> None: ...  # noqa: D102


class GradientStash:
    """One batch after the other: :meth:`begin`, the schedule, :meth:`stash`, :meth:`restore`.

    Args:
        parameters: of this rank, by first name.
        stages: for each parameter the stages of this rank that use it.
        tied: sums over stages on other ranks.
        replicas: averages over replicas; None with one replica.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stages: Mapping[str, Sequence[int]],
        tied: TiedGradients,
        replicas: Averaging | None,
    ) -> None:
        self.parameters = dict(parameters)
        self.stages = stages
        self.tied = tied
        self.replicas = replicas
        self._old: dict[str, Tensor | None] | None = None  # copies of what was there before the batch
        self._made: dict[str, Tensor | None] = {}  # by the schedule, without replicas; else the buckets hold it
        self._accumulates = False
        self._keeps = False

    def begin(self, continues: bool, may_drop: bool, accumulates: bool, num_microbatches: int) -> None:
        """Prepare ``.grad`` for a batch.

        Args:
            continues: it adds to the batch before.
            may_drop: what is in ``.grad`` will be zeroed before it is read; else it is kept until then.
            accumulates: no optimizer step follows.
            num_microbatches: of the batch.
        """
        self._accumulates = accumulates
        self._keeps = continues
        self._old = None
        # Three cases: the batch adds to `.grad` itself (no copy); `.grad` will be zeroed unread (no copy); or `.grad`
        # has to look untouched until `backward`, while the schedule needs an empty one (copy).
        if not continues and not may_drop:
            self._old = {name: _copied(parameter.grad) for name, parameter in self.parameters.items()}
        if self.replicas is not None:
            # Buckets start to be averaged when their gradients are complete: after a backward pass for each micro-batch
            # and stage. What only accumulates is not averaged.
            backwards: dict[str, int] | None = None
            if not accumulates:
                backwards = {name: num_microbatches * len(stages) for name, stages in self.stages.items()}
            self.replicas.begin(backwards, keep=continues)
        elif not continues:
            self._set({})

    def drop(self) -> None:
        """Throw away what the schedule has made of a batch that did not continue another one."""
        self._set(self._old or {})
        self._old = None

    def stash(self) -> None:
        """Take away what the schedule has made, so that zeroing does not reach it, and put back what was there."""
        if self.replicas is not None:
            self.replicas.stash()
        else:
            # References, no copies: `.grad` gets other tensors below, and `zero_grad` reaches only those.
            self._made = self._gradients()
        self._set(self._old or {})

    @torch.no_grad()
    def restore(self, factor: float) -> None:
        """Set ``.grad``. Collective over the pipeline, and over replicas, unless the batch accumulates.

        Args:
            factor: the loss was multiplied by it after the step.

        Raises:
            ValueError: the loss was multiplied, and what accumulated before cannot be told apart.
        """
        if factor != 1.0 and self._keeps:
            raise ValueError(
                f"The loss was multiplied by {factor:g} between `training_step` and `backward` in a batch that "
                "accumulates gradients. In a pipeline gradients exist before that. Multiply it inside `training_step`."
            )
        # The order below is that of one process: gradients of this batch, scaled, summed over the holders of a tied
        # parameter, and only then added to those of earlier batches.
        before: dict[str, Tensor | None] = {}
        if self._old is not None:  # the Trainer may have zeroed it since, so `.grad` counts and not the copy
            before = self._gradients()
        if self.replicas is not None:
            self._set({})  # else what was there before would be taken for what was made
            self.replicas.finish(average=not self._accumulates)
        else:
            self._set(self._made)
            self._made = {}
        if factor != 1.0:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if not self._accumulates:
            self.tied.sum()
        self._add(before)
        self._old = None

    def _add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add to ``.grad`` what accumulated before."""
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def _gradients(self) -> dict[str, Tensor | None]:
        """What ``.grad`` is now, by parameter."""
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def _set(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Let each parameter's ``.grad`` be the one of its name, or None where there is none."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)


def _copied(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.clone()
