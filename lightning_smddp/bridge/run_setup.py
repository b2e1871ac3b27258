"""What does not change from the first batch of a run to its last, as all parts of the bridge need it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.pipeline.mesh import Groups

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class RunSetup:
    """The user's module, the strategy's options, and where this rank stands.

    Attributes:
        module: the user's LightningModule.
        options: the strategy's.
        groups: this rank's position in the mesh, and its process groups.
        device: of this rank.
        step_context: makes, for the name of a step, the context that Lightning enters around it (precision).
        timeout: of collectives.
    """

    module: LightningModule
    options: PipelineOptions
    groups: Groups
    device: torch.device
    step_context: Callable[[str], AbstractContextManager[Any]]
    timeout: timedelta

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline, on all of its ranks."""
        return self.groups.pipeline.size() * self.options.stages_per_rank

    @property
    def rank_of_stage(self) -> Sequence[int]:
        """For each stage the pipeline rank that runs it."""
        return self.options.schedule.rank_of_stage(self.num_stages, self.groups.pipeline.size())

    @property
    def last_rank(self) -> int:
        """The pipeline rank of the last stage, where a step ends: it alone has the step's loss and logs."""
        return self.rank_of_stage[-1]

    @property
    def ends_here(self) -> bool:
        """Whether this rank has the last stage, and so the step's loss and logs."""
        return self.groups.pipeline_rank == self.last_rank

    @property
    def num_replicas(self) -> int:
        """Pipelines that train side by side, each on batches of its own."""
        return self.groups.mesh.num_replicas

    @property
    def world(self) -> dist.ProcessGroup:
        """All ranks of all pipelines."""
        world = dist.group.WORLD
        assert world is not None
        return world

    def is_whole(self) -> bool:
        """Whether all parameters of the module have memory on this rank's device."""
        return all(parameter.device.type == self.device.type for parameter in self.module.parameters())


def warn_on_first_rank(message: str) -> None:
    """Warn on the first rank of the world alone: the others have the same to say."""
    if dist.get_rank() == 0:
        warnings.warn(message, stacklevel=3)
