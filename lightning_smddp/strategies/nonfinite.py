"""``on_nonfinite``: between the backward pass and the optimizer's step, for both strategies and Fabric."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_smddp.communication.nonfinite import NonFiniteWatch, agreed, diagnosis, refuse


class NonFiniteGuard:
    """Stops a step, or leaves it out, when a gradient of any rank is not finite.

    Args:
        mode: ``"error"``, ``"skip"`` or ``"ignore"``.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.skipped = 0

    def check(
        self,
        optimizer: Any,
        found: Mapping[str, str] | None,
        where: str,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Before ``optimizer`` steps. Collective if gradients are bad.

        Args:
            optimizer: about to step.
            found: what is wrong on this rank, by parameter; None if no rank of ``group`` has found anything.
            where: the step, in words.
            device: for messages.
            group: the ranks that come here together; None is all.

        Raises:
            NonFiniteGradientError: on every rank of ``group``, with ``mode="error"``.
        """
        if found is None:
            return
        group = group or dist.group.WORLD
        assert group is not None
        if self.mode == "error":
            raise refuse(diagnosis(found, where, group, device))
        self.skipped += 1
        if self.skipped == 1:
            text = diagnosis(found, where, group, device)
            if dist.get_rank() == 0:
                warnings.warn(f"{text} This step is left out on all ranks (on_nonfinite='skip').", stacklevel=2)
        for parameters in optimizer.param_groups:
            for parameter in parameters["params"]:
                parameter.grad = None  # optimizers pass by parameters without a gradient

    def report(self) -> str | None:
        """What was left out, at the end."""
        return f"on_nonfinite='skip' left out {self.skipped} steps" if self.skipped else None


def by_watch(watch: NonFiniteWatch) -> Mapping[str, str] | None:
    """Findings where buckets are averaged over all ranks: no message is needed."""
    return watch.take_findings() if watch.spoiled() else None


def by_asking(found: Mapping[str, str] | None, device: torch.device) -> Mapping[str, str] | None:
    """Findings where ranks have different gradients; ``found``: None if this rank's are fine. Collective."""
    assert dist.group.WORLD is not None
    return found or {} if agreed(found is not None, dist.group.WORLD, device) else None
