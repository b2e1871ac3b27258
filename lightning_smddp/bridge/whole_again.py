"""A partitioned module becomes whole again: at the end of a run, or in mid-training where no stages fit its step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_smddp.bridge.attempts import FROM_CHECKPOINT
from lightning_smddp.bridge.metrics import PipelineMetrics
from lightning_smddp.bridge.partitioned_module import PartitionedModule
from lightning_smddp.bridge.pipeline_options import PipelineOptions
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.mesh import Groups
from lightning_smddp.pipeline.partition.ownership import Ownership
from lightning_smddp.pipeline.partition.plan import StepFailedError, own_error
from lightning_smddp.pipeline.partition.room import fits_on_hosts
from lightning_smddp.pipeline.state.full_state import gather_full
from lightning_smddp.pipeline.state.optimizer_state import OptimizerPartition
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


def made_whole(divided: PartitionedModule, device: torch.device) -> bool:
    """Give every rank the whole module on its host, where it goes after a run in any case. Collective over all ranks.

    Returns:
        False if a host lacks memory for that: then the parts stay on their ranks, with a warning.
    """
    world = dist.group.WORLD
    assert world is not None
    module = divided.module
    if fits_on_hosts(module, world, device):
        divided.view.close()
        divided.hooks.take(dict(module.named_parameters()))  # also of absent ones, which lose them
        gather_full(module, divided.division.ownership, divided.groups.pipeline, device, to=CPU)
        divided.hooks.give_back()
        return True
    leave_in_parts(module, _BY_MEMORY)
    if dist.get_rank() == 0:
        warnings.warn(f"{type(module).__name__} stays in parts, each on its rank: {_BY_MEMORY}.", stacklevel=2)
    return False


def require_whole_possible(
    error: SplitError, divided: PartitionedModule, groups: Groups, device: torch.device, options: PipelineOptions
) -> None:
    """Raise ``error``, with what to do, on every rank if the module cannot become whole in mid-training. Collective.

    Args:
        error: why the step cannot go on in a pipeline.
        divided: the module.
        groups: this rank's place.
        device: of this rank.
        options: the strategy's.
    """
    obstacle = None
    if options.partition.fallback == "error" or options.meta_init:
        obstacle = "meta_init=True" if options.meta_init else "fallback='error'"
    if obstacle is None and groups.mesh.num_replicas > 1:
        obstacle = "there are several replicas, and others may go on as they are"
    if obstacle is None and device.type == "cuda":
        need = _COPIES * sum(p.numel() * p.dtype.itemsize for p in divided.module.parameters())
        free = torch.cuda.mem_get_info(device)[0]
        if not all(gather_json(need < free, groups.pipeline, device)):
            obstacle = "the model may not fit on one device"
    if obstacle is None:
        return
    if isinstance(error, StepFailedError):
        raise own_error(error) from None
    why = f"{error} It cannot go on as a whole on every rank either: {obstacle}."
    raise SplitError(f"{why} {FROM_CHECKPOINT}") from None


def make_whole(
    divided: PartitionedModule, partitions: Sequence[OptimizerPartition], metrics: PipelineMetrics, device: torch.device
) -> None:
    """Every rank holds everything: parameters, gradients, and states of optimizers and metrics. Collective."""
    module, ownership, group = divided.module, divided.division.ownership, divided.groups.pipeline
    divided.window.tied.sum()
    gradients = gather_tensors(_own_gradients(module, ownership, group.rank()), group, to_all=True, device=device)
    states = [partition.full_state_dict(group, to_all=True, device=device) for partition in partitions]
    metrics.share()
    divided.close()
    divided.view.close()
    divided.hooks.take(dict(module.named_parameters()))  # also of absent ones, which lose them
    gather_full(module, ownership, group, device)
    divided.hooks.give_back()
    for partition, state in zip(partitions, states, strict=True):
        partition.give_back(state)
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name].to(device) if name in gradients else None


def _own_gradients(module: nn.Module, ownership: Ownership, rank: int) -> dict[str, torch.Tensor]:
    named = dict(module.named_parameters())
    found = {name: named[name].grad for name in ownership.parameters if ownership.owner(name) == rank}
    return {name: gradient for name, gradient in found.items() if gradient is not None}
