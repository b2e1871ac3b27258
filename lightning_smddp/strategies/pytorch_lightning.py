"""The strategies for ``import pytorch_lightning``."""

from __future__ import annotations

from lightning_fabric.plugins import CheckpointIO
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from lightning_smddp.strategies.accumulation import AccumulateMicroBatches
from lightning_smddp.strategies.callbacks import MonitorCommunication, RecordTimeline
from lightning_smddp.strategies.ddp import DataParallel
from lightning_smddp.strategies.deepspeed import DeepSpeedParallel
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


class SMDDPDeepSpeedStrategy(DeepSpeedParallel, DeepSpeedStrategy):
    _lightnings = DeepSpeedStrategy


class CommunicationMonitor(MonitorCommunication, Callback):
    pass


class PipelineTimeline(RecordTimeline, Callback):
    pass


CheckpointIO.register(SafeCheckpointIO)
