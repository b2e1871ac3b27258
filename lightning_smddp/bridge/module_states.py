"""The states of a module that a pipeline trains, and what the strategy asks of a module in each of them.

    Unpartitioned --first training batch--> PartitionedModule --end of the run--> WholeAgain

``PartitionedModule`` has a file of its own.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.mesh import Groups
from lightning_smddp.pipeline.state.state_dict import load_full_state_dict
from lightning_smddp.sharding.optimizer_shards import OptimizerShards

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_smddp.strategies.pipeline_options import PipelineOptions

BY_EXCEPTION = "an exception ended the run that had divided it, and other ranks may have been gone"
BY_MEMORY = "a host of the run that had divided it had too little memory for the whole of it on each of its ranks"


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


class ModuleState:
    """What a checkpoint, the optimizers and the watch for NaN ask of a module; here, where each rank has all of it."""

    setup: RunSetup

    def state_dict(self, gather: bool) -> dict[str, Any]:
        """The whole module's on the first rank; without ``gather`` of each rank what it holds. Collective."""
        return self.setup.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load a whole module's state: each rank takes what it holds. Names that differ are an error if ``strict``."""
        load_full_state_dict(self.setup.module, state, strict)

    def optimizer_state(self, optimizer: Optimizer, gather: bool) -> dict[str, Any]:
        """The whole optimizer's on the first rank; without ``gather`` of each rank what it holds. Collective."""
        return optimizer.state_dict()

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of whole optimizers, one for each."""
        raise NotImplementedError

    def compression_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What compression of gradients remembers, by parameter, on the first rank; empty if nothing. Collective."""
        return {}

    def optimized(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameters of all ranks that ``optimizer`` steps."""
        parameters: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        return parameters

    def nonfinite(self) -> dict[str, str] | None:
        """What is not finite in this rank's gradients, by parameter, before averaging; None if there is none."""
        return None

    def report(self) -> CommunicationReport | None:
        """What averaging over replicas cost; None if that is not known. Collective over the replicas."""
        return None


class Unpartitioned(ModuleState):
    """A module before the batch that shows how to partition it.

    What a checkpoint holds may have nowhere to go yet: with ``meta_init`` parameters have no memory, and a rank with
    the optimizers' whole states would need memory for all of them. It waits here.

    Attributes:
        optimizers: that the user built; empty if there is no training.
        shards: of these, not cut yet; empty without ``shard="optimizer"``.
        weights: loaded values of parameters without memory, by name.
        optimizer_states: loaded, one for each optimizer.
        remembered: loaded, what compression remembers of all parameters.
    """

    def __init__(self, setup: RunSetup) -> None:
        self.setup = setup
        self.optimizers: list[Optimizer] = []
        self.shards: list[OptimizerShards] = []
        self.weights: dict[str, Tensor] = {}
        self.optimizer_states: Sequence[Mapping[str, Any]] | None = None
        self.remembered: Mapping[str, Mapping[str, Tensor]] = {}

    @override
    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        # Parameters without memory take no values: those wait until it is known which rank holds them.
        self.weights = {}
        for name, parameter in self.setup.module.named_parameters():
            if parameter.is_meta and name in state:
                self.weights[name] = state[name]
        super().load_state_dict(state, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer, gather: bool) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state_dict()
        if self.optimizer_states is not None:
            index = self.optimizers.index(optimizer)
            state["state"] = self.optimizer_states[index]["state"]
        return state

    @override
    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what is small, options of parameter groups; keep the rest until it is known who needs it."""
        self.optimizer_states = states
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict({**state, "state": {}})

    @override
    def compression_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self.remembered


class WholeAgain(ModuleState):
    """A module that was partitioned, after the run: each rank has all of it, and its own part of the optimizers."""

    def __init__(self, partitioned: ModuleState) -> None:
        self.setup = partitioned.setup
        self._partitioned = partitioned

    @override
    def optimizer_state(self, optimizer: Optimizer, gather: bool) -> dict[str, Any]:
        return self._partitioned.optimizer_state(optimizer, gather)

    @override
    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._partitioned.load_optimizer_states(states)

    @override
    def optimized(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return self._partitioned.optimized(optimizer)


_in_parts: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # why


def leave_in_parts(module: nn.Module, reason: str) -> None:
    """Remember that this rank has its own stages of ``module`` only."""
    _in_parts[module] = reason


def require_whole(module: nn.Module) -> None:
    """Raise ``ValueError`` if an earlier run has left ``module`` in parts, of which this rank has its own."""
    if module in _in_parts and any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} is in parts: {_in_parts[module]}, so that this rank has its own stages only. "
            "Make a new module, and give `fit` the last checkpoint as `ckpt_path`."
        )
