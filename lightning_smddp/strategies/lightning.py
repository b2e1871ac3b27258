"""The strategies for ``import lightning``."""

from __future__ import annotations

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from lightning_smddp.strategies.accumulation import AccumulateMicroBatches
from lightning_smddp.strategies.callbacks import MonitorCommunication, RecordTimeline
from lightning_smddp.strategies.ddp import DataParallel
from lightning_smddp.strategies.deepspeed import DeepSpeedParallel
from lightning_smddp.strategies.environments import LaunchEnvironment
from lightning_smddp.strategies.environments import MPIRunEnvironment as MPIRunEnvironment
from lightning_smddp.strategies.environments import SageMakerEnvironment as SageMakerEnvironment
from lightning_smddp.strategies.fabric import FabricDataParallel
from lightning_smddp.strategies.fabric_fsdp import FabricFullyShardedParallel
from lightning_smddp.strategies.fsdp import FullyShardedParallel
from lightning_smddp.strategies.pipeline import PipelineParallel
from lightning_smddp.strategies.saving import SafeCheckpointIO


class SMDDPStrategy(DataParallel, DDPStrategy):
    pass


class PipelineStrategy(PipelineParallel, DDPStrategy):
    pass


class AccumulationStrategy(AccumulateMicroBatches, SingleDeviceStrategy):
    pass


class SMDDPFSDPStrategy(FullyShardedParallel, DDPStrategy):
    pass


class SMDDPFabricStrategy(FabricDataParallel, FabricDDPStrategy):
    pass


class SMDDPFabricFSDPStrategy(FabricFullyShardedParallel, FabricDDPStrategy):
    pass


class SMDDPDeepSpeedStrategy(DeepSpeedParallel, DeepSpeedStrategy):
    _lightnings = DeepSpeedStrategy


class CommunicationMonitor(MonitorCommunication, Callback):
    pass


class PipelineTimeline(RecordTimeline, Callback):
    pass


CheckpointIO.register(SafeCheckpointIO)
ClusterEnvironment.register(LaunchEnvironment)
