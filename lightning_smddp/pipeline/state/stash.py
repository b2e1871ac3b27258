"""Gradients between a schedule, which makes them early, and a Trainer, which zeroes and wants them later.

A schedule runs forward and backward of all micro-batches within `training_step`. Lightning zeroes gradients behind it,
and calls `backward` on the returned loss. So that loss is :func:`connected` to one function, whose backward delivers
what the schedule has made: hooks, precision plugins and an overridden `backward` work as ever::

    training_step: begin -> schedule makes .grad -> stash      .grad as it was before the batch
    zero_grad                                                  .grad as the Trainer wants it
    backward:      restore                                     .grad = what was there + what the schedule made
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_smddp.pipeline.state.grad_reduce import TiedGradients
from lightning_smddp.pipeline.state.replicas import ReplicaGradients

_ROUNDING = 1e-6  # relative: a loss that nobody scales may arrive with so much


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
        replicas: ReplicaGradients | None,
    ) -> None:
        self.parameters = dict(parameters)
        self.stages = stages
        self.tied = tied
        self.replicas = replicas
        self._old: dict[str, Tensor | None] | None = None  # copies of what was there before the batch
        self._made: dict[str, Tensor | None] = {}  # by the schedule, without replicas; else the buckets hold it
        self._accumulates = False
        self._continues = False

    def begin(self, continues: bool, may_drop: bool, accumulates: bool, num_microbatches: int) -> None:
        """Prepare ``.grad`` for a batch.

        Args:
            continues: it adds to the batch before.
            may_drop: what is in ``.grad`` will be zeroed before it is read; else it is kept until then.
            accumulates: no optimizer step follows.
            num_microbatches: of the batch.
        """
        self._accumulates = accumulates
        self._continues = continues
        self._old = None
        # Three cases: the batch adds to `.grad` itself (no copy); `.grad` will be zeroed unread (no copy); or `.grad`
        # has to look untouched until `backward`, while the schedule needs an empty one (copy: the memory of a gradient
        # that replicas have averaged is used again).
        if not continues and not may_drop:
            self._old = {}
            for name, gradient in self._gradients().items():
                self._old[name] = None if gradient is None else gradient.clone()
        if self.replicas is None:
            if not continues:
                self._set({})
            return
        # Buckets start to be averaged when their gradients are complete: after a backward pass for each micro-batch
        # and stage. What only accumulates is not averaged.
        backwards: dict[str, int] | None = None
        if not accumulates:
            backwards = {name: num_microbatches * len(stages) for name, stages in self.stages.items()}
        self.replicas.begin(backwards, keep=continues)

    def stash(self) -> None:
        """Take away what the schedule has made, so that zeroing does not reach it, and put back what was there."""
        if self.replicas is None:
            self._made = self._gradients()
        else:
            self.replicas.stash()
        self._set(self._old or {})

    @torch.no_grad()
    def restore(self, factor: float) -> None:
        """Set ``.grad``. Collective over the pipeline, and over replicas, unless the batch accumulates.

        Args:
            factor: the loss was multiplied by it after the step.

        Raises:
            ValueError: the loss was multiplied, and what accumulated before cannot be told apart.
        """
        if factor != 1.0 and self._continues:
            raise ValueError(
                f"The loss was multiplied by {factor:g} between `training_step` and `backward` in a batch that "
                "accumulates gradients. In a pipeline gradients exist before that. Multiply it inside `training_step`."
            )
        # In one process's order: gradients of this batch, scaled, summed over the holders of a tied parameter, and
        # only then added to those of earlier batches, as the Trainer has left them.
        before = {} if self._old is None else self._gradients()
        self._set(self._made)
        if self.replicas is not None:
            self.replicas.finish(average=not self._accumulates)
        if factor != 1.0:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if not self._accumulates:
            self.tied.sum()
        for name, gradient in before.items():
            parameter = self.parameters[name]
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._old = None
        self._made = {}

    def _gradients(self) -> dict[str, Tensor | None]:
        """What ``.grad`` is now, by parameter."""
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def _set(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Let each parameter's ``.grad`` be the one of its name, or None where there is none."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)


class _DeferredBackward(torch.autograd.Function):
    """Returns the loss; its backward calls ``deliver``. No input of it gets a gradient.

    ``anchor`` is there because autograd calls ``backward`` only of functions with an input that requires a gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
        ctx.deliver = deliver
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.deliver(gradients[0])
        return None, None, None


def connected(loss: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
    """``loss``, such that a backward pass through it calls ``deliver`` with the gradient that arrives at it."""
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    with torch.enable_grad():
        result: Tensor = _DeferredBackward.apply(anchor, loss.detach(), deliver)  # type: ignore[no-untyped-call]
    return result


def factor_of(arrived: Tensor, expected: float | Tensor) -> float:
    """The gradient that arrived at the loss, divided by the one that the schedule assumed. Waits for a device.

    It is 1 unless somebody scales the loss between ``training_step`` and ``backward``.
    """
    value, expected = float(arrived), float(expected)
    if value == expected or expected == 0.0:
        return 1.0
    ratio = value / expected
    return 1.0 if abs(ratio - 1.0) < _ROUNDING else ratio
