"""The strategy for ``import lightning_fabric``."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy

from lightning_smddp.strategies.fabric import FabricDataParallel


class SMDDPFabricStrategy(FabricDataParallel, DDPStrategy):  # noqa: D101
    __doc__ = FabricDataParallel.__doc__
