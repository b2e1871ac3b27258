"""Gradients that a schedule has made, given to parameters when Lightning calls ``backward``.

A schedule does forward and backward together, inside ``training_step``. Lightning's closure calls ``training_step``,
then zeroes gradients, then calls ``backward`` on the returned loss. So the loss that we return is connected to one
function, whose backward delivers what the schedule has made: hooks, precision plugins and an overridden ``backward``
work as ever. Meanwhile the gradients are in the stash (``pipeline/gradients/gradient_stash.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.bridge.step import Scale
from lightning_smddp.strategies.nonfinite import is_changed_hook

_ROUNDING = 1e-6  # relative: a loss that nobody scales may arrive with so much


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
    # training_step:  schedule does forward and backward -> gradients, stashed -> loss, connected to the anchor
    # zero_grad:      nothing of the batch is in `.grad`
    # backward(loss): -> `_DeferredBackward.backward` -> `deliver` puts the gradients into `.grad`
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    with torch.enable_grad():
        result: Tensor = _DeferredBackward.apply(anchor, loss.detach(), deliver)  # type: ignore[no-untyped-call]
    return result


def factor_of(arrived: Tensor, expected: Scale) -> float:
    """The gradient that arrived at the loss, divided by the one that the schedule assumed. Waits for a device.

    It is 1 unless somebody scales the loss between ``training_step`` and ``backward``, and then gradients that were
    made already have to be multiplied by it.
    """
    value, expected = float(arrived), float(expected)
    if value == expected or expected == 0.0:
        return 1.0
    ratio = value / expected
    if abs(ratio - 1.0) < _ROUNDING:
        return 1.0
    return ratio


def scale_of(scaler: Any, device: torch.device) -> Scale:
    """What a gradient scaler multiplies losses by; on a device it stays there, as reading it waits."""
    if device.type == "cpu":
        return float(scaler.get_scale())
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def arrives_as_expected(trainer: Any) -> bool:
    """Whether nobody but Lightning has the loss in its hands between the step and its backward pass."""
    module = trainer.lightning_module
    plugin = trainer.precision_plugin
    hooks = [(module, "backward"), (plugin, "pre_backward"), (plugin, "backward")]
    for owner in (module, *trainer.callbacks):
        hooks.append((owner, "on_before_backward"))
    if any(is_changed_hook(owner, hook) for owner, hook in hooks):
        return False
    scaler = getattr(plugin, "scaler", None)
    return scaler is None or type(scaler) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
