"""Data and pipeline parallelism for PyTorch Lightning by changing one word: ``Trainer(strategy="smddp")``.

Importing this package registers the strategy names and nothing else; torch and Lightning are imported when a name
is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_smddp._registration import install

if TYPE_CHECKING:
    from lightning_smddp.checkpoint.errors import CheckpointError
    from lightning_smddp.choice.training_plan import plan
    from lightning_smddp.communication.compression import Compression
    from lightning_smddp.communication.errors import RankFailedError, RankTimeoutError
    from lightning_smddp.communication.report import CommunicationReport
    from lightning_smddp.sagemaker import from_sagemaker
    from lightning_smddp.strategies.lightning import (
        AccumulationStrategy,
        CommunicationMonitor,
        MPIRunEnvironment,
        PipelineStrategy,
        PipelineTimeline,
        SafeCheckpointIO,
        SageMakerEnvironment,
        SMDDPDeepSpeedStrategy,
        SMDDPFabricFSDPStrategy,
        SMDDPFabricStrategy,
        SMDDPFSDPStrategy,
        SMDDPStrategy,
    )
    from lightning_smddp.strategies.options import CommunicationOptions, ReliabilityOptions
    from lightning_smddp.strategies.pipeline_options import PartitionOptions

__version__ = "0.1.0"

__all__ = [
    "AccumulationStrategy",
    "CheckpointError",
    "CommunicationMonitor",
    "CommunicationOptions",
    "CommunicationReport",
    "Compression",
    "MPIRunEnvironment",
    "PartitionOptions",
    "PipelineStrategy",
    "PipelineTimeline",
    "RankFailedError",
    "RankTimeoutError",
    "ReliabilityOptions",
    "SMDDPDeepSpeedStrategy",
    "SMDDPFSDPStrategy",
    "SMDDPFabricFSDPStrategy",
    "SMDDPFabricStrategy",
    "SMDDPStrategy",
    "SafeCheckpointIO",
    "SageMakerEnvironment",
    "from_sagemaker",
    "plan",
]

_HOMES = {
    "AccumulationStrategy": "strategies.{namespace}",
    "CheckpointError": "checkpoint.errors",
    "CommunicationMonitor": "strategies.{namespace}",
    "CommunicationOptions": "strategies.options",
    "CommunicationReport": "communication.report",
    "Compression": "communication.compression",
    "MPIRunEnvironment": "strategies.{fabric}",
    "PartitionOptions": "strategies.pipeline_options",
    "PipelineStrategy": "strategies.{namespace}",
    "PipelineTimeline": "strategies.{namespace}",
    "RankFailedError": "communication.errors",
    "RankTimeoutError": "communication.errors",
    "ReliabilityOptions": "strategies.options",
    "SMDDPDeepSpeedStrategy": "strategies.{namespace}",
    "SMDDPFSDPStrategy": "strategies.{namespace}",
    "SMDDPFabricFSDPStrategy": "strategies.{fabric}",
    "SMDDPFabricStrategy": "strategies.{fabric}",
    "SMDDPStrategy": "strategies.{namespace}",
    "SafeCheckpointIO": "strategies.{namespace}",
    "SageMakerEnvironment": "strategies.{fabric}",
    "from_sagemaker": "sagemaker",
    "plan": "choice.training_plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562), from whichever Lightning is installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.util import find_spec

    unified = find_spec("lightning") is not None
    home = _HOMES[name].format(
        namespace="lightning" if unified else "pytorch_lightning",
        fabric="lightning" if unified else "lightning_fabric",
    )
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
