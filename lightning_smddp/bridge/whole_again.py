"""A partitioned module becomes whole again at the end of a run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp.bridge.module_states import ModuleState
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.run_setup import warn_on_first_rank
from lightning_smddp.pipeline.partition.hardware import fits_on_hosts
from lightning_smddp.pipeline.state.full_state import gather_full
from lightning_smddp.wire.stream import CPU

BY_EXCEPTION = "an exception ended the run that had divided it, and other ranks may have been gone"
_BY_MEMORY = "a host of the run that had divided it had too little memory for the whole of it on each of its ranks"

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


class WholeAgain(ModuleState):
    """A module that was partitioned, after the run: each rank has all of it, and its own part of the optimizers."""

    def __init__(self, partitioned: PartitionedModule) -> None:
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


def gather_at_end(partitioned: PartitionedModule) -> bool:
    """Give every rank the whole module on its host, where it goes after a run in any case. Collective over all ranks.

    Returns:
        False if a host lacks memory for that: then the parts stay on their ranks, with a warning.
    """
    setup = partitioned.setup
    if fits_on_hosts(setup.module, setup.world, setup.device):
        partitioned.view.close()
        gather_full(setup.module, partitioned.plan.ownership, setup.groups.pipeline, setup.device, to=CPU)
        return True
    leave_in_parts(setup.module, _BY_MEMORY)
    warn_on_first_rank(f"{type(setup.module).__name__} stays in parts, each on its rank: {_BY_MEMORY}.")
    return False
