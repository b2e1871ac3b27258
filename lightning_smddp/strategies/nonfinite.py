"""``on_nonfinite``: between the backward pass and the optimizer's step, for the Trainer strategies and Fabric's."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_smddp.communication.groups import world
from lightning_smddp.communication.nonfinite import NonFinite, agreed, diagnosis, refuse
from lightning_smddp.patches import patched


class NonFiniteGuard:
    """Stops a step, or leaves it out, when a gradient of any rank is not finite.

    Args:
        mode: ``"error"``, ``"skip"`` or ``"ignore"``.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.skipped = 0
        self._losses: deque[Tensor] = deque(maxlen=100)  # of backward passes since the last step

    def watches(self, precision: Any) -> bool:
        """Whether to look for NaN and inf. A gradient scaler makes inf on purpose, and skips such steps itself."""
        return self.mode != "ignore" and getattr(precision, "scaler", None) is None

    def note(self, loss: Tensor) -> None:
        """A backward pass of ``loss`` begins: it may tell which rank is the cause."""
        self._losses.append(loss.detach())

    def check(self, optimizer: Any, found: NonFinite | None, where: str, group: dist.ProcessGroup) -> None:
        """Before ``optimizer`` steps. Collective if gradients are bad.

        Args:
            optimizer: about to step.
            found: what is wrong on this rank; None if no rank of ``group`` has found anything.
            where: the step, in words.
            group: the ranks that come here together.

        Raises:
            NonFiniteGradientError: on every rank of ``group``, with ``mode="error"``.
        """
        losses = list(self._losses)
        self._losses.clear()
        if found is None:
            return
        own = dict(found.own)
        for loss in losses:
            if not bool(loss.isfinite().all()):
                own["the loss"] = str(float(loss.sum()))
        self.left_out(NonFinite(found.averages, own), where, group)
        for parameters in optimizer.param_groups:
            for parameter in parameters["params"]:
                parameter.grad = None  # optimizers pass by parameters without a gradient

    def left_out(self, found: NonFinite, where: str, group: dist.ProcessGroup) -> None:
        """All ranks of ``group`` leave out the step ``where``, for what was ``found``. Collective for the first one.

        Raises:
            NonFiniteGradientError: with ``mode="error"``.
        """
        self.skipped += 1
        if self.mode == "ignore" or (self.mode == "skip" and self.skipped > 1):
            return  # all ranks of the group have skipped as many
        text = diagnosis(found, where, group)
        if self.mode == "error":
            raise refuse(text)
        if group.rank() == 0:
            warnings.warn(
                f"{text} This step is left out on all ranks with these averages (on_nonfinite='skip').", stacklevel=3
            )


def by_asking(found: NonFinite | None, device: torch.device) -> NonFinite | None:
    """Findings where ranks have different gradients; ``found``: None if this rank's are fine. Collective."""
    return found or NonFinite({}) if agreed(found is not None, world(), device) else None


@contextmanager
def before_step(optimizer: Any, look: Callable[[], None]) -> Iterator[None]:
    """In this context ``optimizer.step`` calls ``look`` behind its closure, just before it changes parameters.

    Lightning's closure ends with the hooks that may change gradients: ``on_before_optimizer_step`` and
    ``configure_gradient_clipping``.
    """
    original = optimizer.step

    @functools.wraps(original)
    def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if closure is None:
            look()
            return original(**options)

        def looked() -> Any:
            result = closure()
            look()
            return result

        return original(closure=looked, **options)

    with patched([(vars(optimizer), "step", step)]):
        yield
