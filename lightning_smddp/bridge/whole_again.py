"""A partitioned module becomes whole again: at the end of a run, or in mid-training where no stages fit its step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.module_states import ModuleState
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.run_setup import RunSetup, warn_on_first_rank
from lightning_smddp.bridge.training import FROM_CHECKPOINT
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.hardware import fits_on_hosts
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.state.full_state import gather_full
from lightning_smddp.wire.gather import gather_json
from lightning_smddp.wire.stream import CPU, gather_tensors

_COPIES = 4  # of all parameters, for training: they, their gradients, and two in the optimizer
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
        _gather_parameters(partitioned, CPU)
        return True
    leave_in_parts(setup.module, _BY_MEMORY)
    warn_on_first_rank(f"{type(setup.module).__name__} stays in parts, each on its rank: {_BY_MEMORY}.")
    return False


def _gather_parameters(partitioned: PartitionedModule, to: torch.device) -> None:
    setup = partitioned.setup
    partitioned.view.close()
    partitioned.hooks.take(dict(setup.module.named_parameters()))  # also of absent ones, which lose them
    gather_full(setup.module, partitioned.plan.ownership, setup.groups.pipeline, setup.device, to=to)
    partitioned.hooks.give_back()


def require_whole_possible(error: SplitError, setup: RunSetup) -> None:
    """Raise ``error``, with what to do, on every rank if the module cannot become whole in mid-training. Collective.

    Args:
        error: why the step cannot go on in a pipeline.
        setup: of the run.
    """
    obstacle = _obstacle(setup)
    if obstacle is None:
        return
    if isinstance(error, StepFailedError):
        raise own_error(error) from None
    why = f"{error} It cannot go on as a whole on every rank either: {obstacle}."
    raise SplitError(f"{why} {FROM_CHECKPOINT}") from None


def _obstacle(setup: RunSetup) -> str | None:
    if setup.options.meta_init:
        return "meta_init=True"
    if setup.options.partition.fallback == "error":
        return "fallback='error'"
    if setup.num_replicas > 1:
        return "there are several replicas, and others may go on as they are"
    if setup.device.type == "cuda":
        size = sum(parameter.numel() * parameter.dtype.itemsize for parameter in setup.module.parameters())
        free, _ = torch.cuda.mem_get_info(setup.device)
        fits = _COPIES * size < free
        if not all(gather_json(fits, setup.groups.pipeline, setup.device)):
            return "the model may not fit on one device"
    return None


def gather_in_training(partitioned: PartitionedModule, metrics: PipelineMetrics) -> None:
    """Give every rank everything: parameters, gradients, and states of optimizers and metrics. Collective."""
    setup = partitioned.setup
    group = setup.groups.pipeline
    # What is gathered is taken while the parts are as they were; parameters come last, and then what goes with them.
    partitioned.stash.tied.sum()
    gradients = gather_tensors(_own_gradients(partitioned), group, to_all=True, device=setup.device)
    states = []
    for partition in partitioned.optimizers:
        states.append(partition.full_state_dict(group, to_all=True, device=setup.device))
    metrics.share()
    partitioned.close()
    _gather_parameters(partitioned, setup.device)
    for partition, state in zip(partitioned.optimizers, states, strict=True):
        partition.give_back(state)
    for name, parameter in setup.module.named_parameters():
        parameter.grad = None
        if name in gradients:
            parameter.grad = gradients[name].to(setup.device)


def _own_gradients(partitioned: PartitionedModule) -> dict[str, torch.Tensor]:
    """Of a parameter that several ranks have, one of them gives the gradient."""
    ownership, rank = partitioned.plan.ownership, partitioned.setup.groups.pipeline_rank
    named = dict(partitioned.setup.module.named_parameters())
    found = {}
    for name in ownership.parameters:
        gradient = named[name].grad
        if ownership.owner(name) == rank and gradient is not None:
            found[name] = gradient
    return found
