"""The strategies for ``import pytorch_lightning``."""

from __future__ import annotations

from lightning_fabric.plugins import CheckpointIO
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from lightning_smddp._compat.trainer import launchers_of
from lightning_smddp.strategies.accumulation import AccumulateMicroBatches
from lightning_smddp.strategies.callbacks import MonitorCommunication, RecordTimeline
from lightning_smddp.strategies.ddp import DataParallel
from lightning_smddp.strategies.deepspeed import DeepSpeedParallel
from lightning_smddp.strategies.fsdp import FullyShardedParallel
from lightning_smddp.strategies.launchers import ScriptLaunching, SpawnLaunching
from lightning_smddp.strategies.pipeline import PipelineParallel
from lightning_smddp.strategies.saving import SafeCheckpointIO

_Script, _Spawn = launchers_of(DDPStrategy)


class _ScriptLauncher(ScriptLaunching, _Script):  # type: ignore[valid-type]
    """Picklable by its name."""


class _SpawnLauncher(SpawnLaunching, _Spawn):  # type: ignore[valid-type]
    """Picklable by its name."""


class SMDDPStrategy(DataParallel, DDPStrategy):
    _script_launcher, _spawn_launcher = _ScriptLauncher, _SpawnLauncher


class PipelineStrategy(PipelineParallel, DDPStrategy):
    _script_launcher, _spawn_launcher = _ScriptLauncher, _SpawnLauncher


class AccumulationStrategy(AccumulateMicroBatches, SingleDeviceStrategy):
    pass


class SMDDPFSDPStrategy(FullyShardedParallel, DDPStrategy):
    _script_launcher, _spawn_launcher = _ScriptLauncher, _SpawnLauncher


class SMDDPDeepSpeedStrategy(DeepSpeedParallel, DeepSpeedStrategy):
    _script_launcher, _spawn_launcher = _ScriptLauncher, _SpawnLauncher
    _lightnings = DeepSpeedStrategy


class CommunicationMonitor(MonitorCommunication, Callback):
    pass


class PipelineTimeline(RecordTimeline, Callback):
    pass


CheckpointIO.register(SafeCheckpointIO)
