"""What DeepSpeed's steps do to parameters and one process does not: seen before a step, and said.

It takes a gradient that never came for zero. Where it steps a copy of its own it undoes what was written
to a parameter.
"""

from __future__ import annotations

import warnings
from functools import partial

from torch import Tensor, nn

_SHOWN = 5  # names in a message


class GradientsSeen:
    """Notes which parameters get a gradient before the first step.

    Weight decay and momentum change a parameter whose gradient is zero; one process leaves those without a gradient
    alone.

    Args:
        module: whose parameters are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._missing = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        parameters = dict(module.named_parameters())
        self._handles = [parameters[name].register_hook(partial(self._seen, name)) for name in self._missing]

    def _seen(self, name: str, _: Tensor) -> None:
        if name in self._missing:
            self._missing.remove(name)

    def look(self, speaks: bool) -> None:
        """Before the first step: warn of the others, if this rank ``speaks``."""
        for handle in self._handles:
            handle.remove()
        if self._missing and speaks:
            warnings.warn(
                f"No gradient came to {_shown(self._missing)} in the first step. DeepSpeed takes it for zero, so "
                "weight decay and momentum change such parameters, which one process leaves alone. Freeze what is not "
                "used: `parameter.requires_grad_(False)`.",
                stacklevel=2,
            )


class UnseenWrites:
    """Finds parameters that were written to in place since the last step, by torch's count of such writes.

    DeepSpeed itself gives parameters other memory, which does not count. Nor does what is written through ``.data``.

    Args:
        module: whose parameters are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.note()

    def note(self) -> None:
        """Behind a step: what follows counts."""
        self._versions = self._now()

    def _now(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self._module.named_parameters()}

    def require_none(self) -> None:
        """Before a step. Raises ``ValueError`` if a parameter was written to."""
        written = []
        for name, version in self._now().items():
            if version != self._versions.get(name, version):
                written.append(name)
        if written:
            raise ValueError(
                f"{_shown(written)}: written to since the last step, in a hook, say. DeepSpeed steps a copy of its own "
                "here (in stage 3, and in 16 bits), and would undo it. Write with "
                "`deepspeed.utils.safe_set_full_fp32_param(parameter, value)`, or use stage 1 or 2 with "
                "precision='32-true'."
            )


def _shown(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    if more > 0:
        shown += f" and {more} more"
    return shown
