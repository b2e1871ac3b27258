"""The strategies for ``import pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy

from lightning_smddp.strategies.monitor import MonitorCommunication
from lightning_smddp.strategies.pipeline import PipelineParallel
from lightning_smddp.strategies.timeline import RecordTimeline
from lightning_smddp.strategies.trainer import TrainerDataParallel


class SMDDPStrategy(TrainerDataParallel, DDPStrategy):  # noqa: D101
    __doc__ = TrainerDataParallel.__doc__


class PipelineStrategy(PipelineParallel, DDPStrategy):  # noqa: D101
    __doc__ = PipelineParallel.__doc__


class CommunicationMonitor(MonitorCommunication, Callback):  # noqa: D101
    __doc__ = MonitorCommunication.__doc__


class PipelineTimeline(RecordTimeline, Callback):  # noqa: D101
    __doc__ = RecordTimeline.__doc__
