"""The strategy and the cluster environments for ``import lightning_fabric``."""

from __future__ import annotations

from lightning_fabric.plugins.environments import ClusterEnvironment
from lightning_fabric.plugins.environments import LightningEnvironment as LightningEnvironment
from lightning_fabric.strategies import DDPStrategy

from lightning_smddp.strategies.environments import ReadsMPIRun, ReadsPod, ReadsSageMaker
from lightning_smddp.strategies.fabric import FabricDataParallel
from lightning_smddp.strategies.fabric_fsdp import FabricFullyShardedParallel


class SMDDPFabricStrategy(FabricDataParallel, DDPStrategy):
    pass


class SMDDPFabricFSDPStrategy(FabricFullyShardedParallel, DDPStrategy):
    pass


class SageMakerEnvironment(ReadsSageMaker, ClusterEnvironment):
    pass


class MPIRunEnvironment(ReadsMPIRun, ClusterEnvironment):
    pass


class PodEnvironment(ReadsPod, ClusterEnvironment):
    pass
