"""The strategies and the cluster environments for ``import lightning_fabric``."""

from __future__ import annotations

from lightning_fabric.plugins.environments import ClusterEnvironment
from lightning_fabric.strategies import DDPStrategy

from lightning_smddp.strategies.environments import LaunchEnvironment
from lightning_smddp.strategies.environments import MPIRunEnvironment as MPIRunEnvironment
from lightning_smddp.strategies.environments import SageMakerEnvironment as SageMakerEnvironment
from lightning_smddp.strategies.fabric import FabricDataParallel
from lightning_smddp.strategies.fabric_fsdp import FabricFullyShardedParallel


class SMDDPFabricStrategy(FabricDataParallel, DDPStrategy):
    pass


class SMDDPFabricFSDPStrategy(FabricFullyShardedParallel, DDPStrategy):
    pass


ClusterEnvironment.register(LaunchEnvironment)
