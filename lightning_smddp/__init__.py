"""Data and pipeline parallelism for PyTorch Lightning by changing one word: ``Trainer(strategy="smddp")``.

Importing this package registers the strategy names and nothing else; torch and Lightning are imported when a name
is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_smddp._registration import install

if TYPE_CHECKING:
    from lightning_smddp.checkpoint.files import CheckpointError as CheckpointError
    from lightning_smddp.choice.training_plan import plan as plan
    from lightning_smddp.communication.compression import Compression as Compression
    from lightning_smddp.communication.diloco import DiLoCo as DiLoCo
    from lightning_smddp.communication.objects import RankFailedError as RankFailedError
    from lightning_smddp.communication.objects import RankTimeoutError as RankTimeoutError
    from lightning_smddp.communication.report import CommunicationReport as CommunicationReport
    from lightning_smddp.sagemaker import from_sagemaker as from_sagemaker
    from lightning_smddp.strategies.lightning import *  # noqa: F403
    from lightning_smddp.strategies.options import CommunicationOptions as CommunicationOptions
    from lightning_smddp.strategies.options import PartitionOptions as PartitionOptions
    from lightning_smddp.strategies.options import ReliabilityOptions as ReliabilityOptions
    from lightning_smddp.strategies.saving import SafeCheckpointIO as SafeCheckpointIO

__version__ = "0.1.0"

_TRAINER = "AccumulationStrategy CommunicationMonitor PipelineStrategy PipelineTimeline SMDDPDeepSpeedStrategy"
_FABRIC = "MPIRunEnvironment SMDDPFabricFSDPStrategy SMDDPFabricStrategy SageMakerEnvironment"
_NAMES = {  # of each module; {trainer} and {fabric} are `lightning`, or what is installed in its place
    "checkpoint.files": "CheckpointError",
    "choice.training_plan": "plan",
    "communication.compression": "Compression",
    "communication.diloco": "DiLoCo",
    "communication.objects": "RankFailedError RankTimeoutError",
    "communication.report": "CommunicationReport",
    "sagemaker": "from_sagemaker",
    "strategies.options": "CommunicationOptions PartitionOptions ReliabilityOptions",
    "strategies.{fabric}": _FABRIC,
    "strategies.{trainer}": f"{_TRAINER} SMDDPFSDPStrategy SMDDPStrategy SafeCheckpointIO",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562), from whichever Lightning is installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.util import find_spec

    trainer, fabric = "pytorch_lightning", "lightning_fabric"
    if find_spec("lightning") is not None:
        trainer = fabric = "lightning"
    home = _HOMES[name].format(trainer=trainer, fabric=fabric)
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
