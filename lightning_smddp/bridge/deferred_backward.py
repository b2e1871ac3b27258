"""Gradients that a schedule has made, handed over when Lightning calls ``backward``.

A schedule does forward and backward together, inside ``training_step``. Lightning's closure calls ``training_step``,
then zeroes gradients, then calls ``backward`` on the returned loss. So the loss that we return is connected to one
function, whose backward delivers what the schedule has made: hooks, precision plugins and an overridden ``backward``
work as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_smddp.bridge.step import Scale
from lightning_smddp.strategies.nonfinite import is_changed_hook


class _HandOver(torch.autograd.Function):
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
        result: Tensor = _HandOver.apply(anchor, loss.detach(), deliver)  # type: ignore[no-untyped-call]
    return result


def factor_of(arrived: Tensor, expected: Scale) -> float:
    """By how much the gradient at the loss differs from what the schedule assumed. Waits for a device."""
    value, expected = float(arrived), float(expected)
    if value == expected or expected == 0.0:
        return 1.0
    ratio = value / expected
    return 1.0 if abs(ratio - 1.0) < 1e-6 else ratio


def scale_of(scaler: Any, device: torch.device) -> Scale:
    """What a gradient scaler multiplies losses by; on a device it stays there, as reading it waits."""
    if device.type == "cpu":
        return float(scaler.get_scale())
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def arrives_as_expected(trainer: Any) -> bool:
    """Whether nobody but Lightning has the loss in its hands between the step and its backward pass."""
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    hooks = [(owner, "on_before_backward") for owner in (module, *trainer.callbacks)]
    hooks += [(module, "backward"), (plugin, "pre_backward"), (plugin, "backward")]
    if any(is_changed_hook(owner, hook) for owner, hook in hooks):
        return False
    return type(getattr(plugin, "scaler", None)) in (type(None), torch.amp.GradScaler, torch.cuda.amp.GradScaler)
