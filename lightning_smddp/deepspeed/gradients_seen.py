"""Parameters that get no gradient, which DeepSpeed steps with zeros."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

_SHOWN = 5


class GradientsSeen:
    """Notes which parameters get a gradient before the first step.

    Weight decay and momentum change a parameter whose gradient is zero; one process leaves those without a gradient
    alone.

    Args:
        module: whose parameters are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._waiting: dict[str, Any] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._waiting[name] = parameter.register_hook(lambda _, name=name: self._seen(name))

    def _seen(self, name: str) -> Tensor | None:
        hook = self._waiting.pop(name, None)
        if hook is not None:
            hook.remove()
        return None

    def look(self, speaks: bool) -> None:
        """Before the first step: warn of the others, if this rank ``speaks``."""
        names = list(self._waiting)
        for name in names:
            self._seen(name)
        if names and speaks:
            shown = ", ".join(names[:_SHOWN])
            if len(names) > _SHOWN:
                shown += f" and {len(names) - _SHOWN} more"
            warnings.warn(
                f"No gradient came to {shown} in the first step. DeepSpeed takes it for zero, so weight decay and "
                "momentum change such parameters, which one process leaves alone. Freeze what is not used: "
                "`parameter.requires_grad_(False)`.",
                stacklevel=2,
            )
