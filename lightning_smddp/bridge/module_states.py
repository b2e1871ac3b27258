"""The states of a module that a pipeline trains, and what the strategy asks of a module in each of them.

    Unpartitioned --first training batch--> PartitionedModule --end of the run--> WholeAgain

``PartitionedModule`` has a file of its own; ``WholeAgain`` is in ``whole_again.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp.bridge.run_setup import RunSetup
from lightning_smddp.communication.report import CommunicationReport
from lightning_smddp.pipeline.state.full_state import load_full_state_dict
from lightning_smddp.sharding.optimizer_shards import OptimizerShards


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
