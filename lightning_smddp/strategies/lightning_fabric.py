"""The strategy and the cluster environments for ``import lightning_fabric``."""

from __future__ import annotations

from lightning_fabric.plugins.environments import ClusterEnvironment
from lightning_fabric.plugins.environments import LightningEnvironment as LightningEnvironment
from lightning_fabric.strategies import DDPStrategy

from lightning_smddp.strategies.environments import ReadsMPIRun, ReadsPod, ReadsSageMaker
from lightning_smddp.strategies.fabric import FabricDataParallel
from lightning_smddp.strategies.fabric_fsdp import FabricFullyShardedParallel


class SMDDPFabricStrategy(FabricDataParallel, DDPStrategy):  # noqa: D101
    __doc__ = FabricDataParallel.__doc__


class SMDDPFabricFSDPStrategy(FabricFullyShardedParallel, DDPStrategy):  # noqa: D101
    __doc__ = FabricFullyShardedParallel.__doc__


class SageMakerEnvironment(ReadsSageMaker, ClusterEnvironment):  # noqa: D101
    __doc__ = ReadsSageMaker.__doc__


class MPIRunEnvironment(ReadsMPIRun, ClusterEnvironment):  # noqa: D101
    __doc__ = ReadsMPIRun.__doc__


class PodEnvironment(ReadsPod, ClusterEnvironment):  # noqa: D101
    __doc__ = ReadsPod.__doc__
