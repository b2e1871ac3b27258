"""Parameters that are unfrozen in mid-training, as by Lightning's ``BaseFinetuning``.

``DistributedDataParallel`` averages the gradients of what required gradients when it wrapped the module. Others that
are unfrozen later it leaves alone, without a word: each rank trains its own copy of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_smddp.wording import counted

_SHOWN = 4


class FrozenParameters:
    """What is frozen while ``module`` is wrapped.

    Args:
        module: about to be wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}

    def unfrozen(self) -> list[str]:
        """Names of those that require gradients by now."""
        return [name for name, parameter in self._frozen.items() if parameter.requires_grad]

    @contextmanager
    def others_require_gradients(self) -> Iterator[None]:
        """In this context everything that was wrapped requires gradients, to be wrapped again.

        Steps may freeze and unfreeze them (``toggle_optimizer``), and DDP takes what requires gradients right now.
        """
        paused = []
        for name, parameter in self.module.named_parameters():
            if name not in self._frozen and not parameter.requires_grad:
                paused.append(parameter)
        for parameter in paused:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in paused:
                parameter.requires_grad_(False)

    def require_no_gradients(self, cure: str) -> None:
        """Raise ``RuntimeError``, with ``cure``, if one of them was given a gradient: of this rank alone."""
        trained = [name for name in self.unfrozen() if self._frozen[name].grad is not None]
        if trained:
            names = ", ".join(trained[:_SHOWN])
            if len(trained) > _SHOWN:
                names += ", ..."
            raise RuntimeError(
                f"{counted(len(trained), 'parameter')} ({names}) with new gradients were frozen when the module was "
                f"wrapped, so these gradients are not averaged: each rank would train its own copy. {cure}"
            )
