"""The strategies for ``import lightning``."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_smddp.strategies.fabric import FabricDataParallel
from lightning_smddp.strategies.monitor import MonitorCommunication
from lightning_smddp.strategies.pipeline import PipelineParallel
from lightning_smddp.strategies.timeline import RecordTimeline
from lightning_smddp.strategies.trainer import TrainerDataParallel


class SMDDPStrategy(TrainerDataParallel, DDPStrategy):  # noqa: D101
    __doc__ = TrainerDataParallel.__doc__


class PipelineStrategy(PipelineParallel, DDPStrategy):  # noqa: D101
    __doc__ = PipelineParallel.__doc__


class SMDDPFabricStrategy(FabricDataParallel, FabricDDPStrategy):  # noqa: D101
    __doc__ = FabricDataParallel.__doc__


class CommunicationMonitor(MonitorCommunication, Callback):  # noqa: D101
    __doc__ = MonitorCommunication.__doc__


class PipelineTimeline(RecordTimeline, Callback):  # noqa: D101
    __doc__ = RecordTimeline.__doc__
