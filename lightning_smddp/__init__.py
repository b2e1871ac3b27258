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
    from lightning_smddp.strategies.options import CommunicationOptions, PartitionOptions, ReliabilityOptions

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

_OF_FABRIC = ("MPIRunEnvironment", "SMDDPFabricFSDPStrategy", "SMDDPFabricStrategy", "SageMakerEnvironment")
# All others are the Trainer's: for `lightning`, or `pytorch_lightning` where that alone is installed.
_HOMES = {
    "CheckpointError": "checkpoint.errors",
    "CommunicationOptions": "strategies.options",
    "CommunicationReport": "communication.report",
    "Compression": "communication.compression",
    "PartitionOptions": "strategies.options",
    "RankFailedError": "communication.errors",
    "RankTimeoutError": "communication.errors",
    "ReliabilityOptions": "strategies.options",
    "from_sagemaker": "sagemaker",
    "plan": "choice.training_plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562), from whichever Lightning is installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.util import find_spec

    namespace = "lightning_fabric" if name in _OF_FABRIC else "pytorch_lightning"
    if find_spec("lightning") is not None:
        namespace = "lightning"
    home = _HOMES.get(name, f"strategies.{namespace}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
