"""What is written to parameters where DeepSpeed does not see it: it steps a copy of its own, and would undo it."""

from __future__ import annotations

from torch import nn

_SHOWN = 5


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
        self._versions = {name: parameter._version for name, parameter in self._module.named_parameters()}

    def require_none(self) -> None:
        """Before a step. Raises ``ValueError`` if a parameter was written to."""
        now = {name: parameter._version for name, parameter in self._module.named_parameters()}
        written = [name for name, version in now.items() if version != self._versions.get(name, version)]
        if written:
            shown = ", ".join(written[:_SHOWN])
            if len(written) > _SHOWN:
                shown += f" and {len(written) - _SHOWN} more"
            raise ValueError(
                f"{shown}: written to since the last step, in a hook, say. DeepSpeed steps a copy of its own here (in "
                "stage 3, and in 16 bits), and would undo it. Write with "
                "`deepspeed.utils.safe_set_full_fp32_param(parameter, value)`, or use stage 1 or 2 with "
                "precision='32-true'."
            )
