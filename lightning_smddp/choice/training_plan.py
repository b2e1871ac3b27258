"""``lightning_smddp.plan``: for each strategy whether a module fits, and what a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch

from lightning_smddp.bridge.step import loss_of
from lightning_smddp.choice.estimates import Estimate, Sizes, data_parallel, fully_sharded
from lightning_smddp.choice.first_batch import FirstBatch, UnplannableError, look_at_first_batch
from lightning_smddp.choice.pipelines import estimate_pipelines
from lightning_smddp.choice.profiles import StepProfile, profile_optimizer, profile_step
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pytree import tensors
from lightning_smddp.sharding.optimizer_trial import why_not_one_by_one
from lightning_smddp.sharding.units import find_units
from lightning_smddp.wording import counted

_GIB = 2**30
_MIB = 2**20
_COLUMNS = ("fits", "MiB", "parameters", "gradients", "optimizer", "activ.", "communic.", "temporary")
_LEGEND = (
    "MiB a rank at its fullest moment, in parts; memory that ranks share is counted once. Beside it each process has "
    "what it has before training: Python, torch and Lightning."
)


@dataclass(frozen=True)
class TrainingPlan:
    """What was predicted; ``print`` shows it as a table.

    Attributes:
        module: name of the module's class.
        devices: ranks, on one node.
        memory_gb: GiB that a rank may use.
        estimates: of each strategy, the simplest first.
    """

    module: str
    devices: int
    memory_gb: float
    estimates: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate | None:
        """The one to take: the first that fits, which is the simplest; None if none does."""
        return next((estimate for estimate in self.estimates if estimate.fits), None)

    @property
    def trainer(self) -> str | None:
        """The line to write for :attr:`best`."""
        return f"Trainer(strategy={self.best.strategy}, devices={self.devices})" if self.best else None

    def __str__(self) -> str:
        ranks = counted(self.devices, "rank")
        lines = [f"{self.module} on {ranks} of {self.memory_gb:g} GiB, predicted from a CPU trace"]
        lines.append(_line("", _COLUMNS))
        remarks = []
        for estimate in self.estimates:
            what = estimate.name
            if estimate.memory is None:
                what += " cannot train it"
            else:
                sizes = (estimate.memory.total, *astuple(estimate.memory))
                fits = "yes" if estimate.fits else "no"
                lines.append(_line(estimate.name, (fits, *map(_mib, sizes))))
            remarks += [f"{what}: {note}" for note in estimate.notes]
        return "\n".join([*lines, "", _LEGEND, *remarks, "", self._advice()])

    def _advice(self) -> str:
        if self.trainer is not None:
            return self.trainer
        least = min(estimate.memory.total for estimate in self.estimates if estimate.memory is not None) / _GIB
        return (
            f"No strategy fits {self.memory_gb:g} GiB a rank; the least is {least:.2f} GiB. Use more devices, or a "
            "smaller batch."
        )


def _mib(size: int) -> str:
    """Three significant digits, or all in front of the point."""
    mib = size / _MIB
    return f"{mib:.3g}" if mib < 100 else f"{mib:.0f}"


def _line(name: str, cells: Iterable[str]) -> str:
    return f"  {name:<32}" + "".join(f"{cell:>11}" for cell in cells)


def plan(module: Any, devices: int, memory_gb: float, datamodule: Any = None, precision: Any = None) -> TrainingPlan:
    """Say which strategies can train ``module`` in the memory that there is, and what a rank of each holds.

    The module's first training batch is run here, in this process and on its CPU, forward and backward; nothing of that
    stays, and no optimizer steps. This process needs the parameters and one batch's activations, no gradients and no
    optimizer state.

    Args:
        module: a LightningModule.
        devices: ranks, on one node.
        memory_gb: GiB of a rank for everything but what a process has before training: Python, torch, Lightning.
        datamodule: gives the batch, if the module has no ``train_dataloader``.
        precision: of the Trainer.

    Raises:
        UnplannableError: a ``ValueError``: an argument is not possible, or there is no step to look at; with the cure.
    """
    if not isinstance(devices, int) or devices < 1:
        raise UnplannableError(f"devices={devices!r} has to be a number from 1: the ranks to train on.")
    if not 0 < memory_gb < math.inf:
        raise UnplannableError(f"memory_gb={memory_gb!r} has to be positive: the GiB that a rank may use.")
    return look_at_first_batch(module, datamodule, precision, lambda first: _planned(first, devices, memory_gb))


def _planned(first: FirstBatch, devices: int, memory_gb: float) -> TrainingPlan:
    module = first.module
    limit = memory_gb * _GIB
    optimizer = first.optimizers[0]  # Lightning steps no other one, where it optimizes
    state, temporary = profile_optimizer(optimizer)
    sizes = Sizes(
        parameters=_bytes(module.parameters()),
        buffers=_bytes(module.buffers()),
        gradients=_bytes(parameter for parameter in module.parameters() if parameter.requires_grad),
        state=sum(state.values()),
        optimizer_temporary=temporary,
        batch=_bytes(tensors(first.batch)),
    )
    step = _profile(first)
    units = [_bytes(module.get_submodule(name).parameters()) for name in find_units(module).names]
    in_shares = partial(fully_sharded, sizes, step, devices, units)
    shared = Estimate("smddp, shard='optimizer'", 'SMDDPStrategy(shard="optimizer")')
    why = why_not_one_by_one(optimizer)
    if why is None:
        shared = replace(shared, memory=data_parallel(sizes, step, devices, shards_state=True))
    else:
        shared = replace(shared, notes=(f"{type(optimizer).__name__} cannot be shared: {why}",))
    estimates = [  # the simplest first
        Estimate("smddp", '"smddp"', data_parallel(sizes, step, devices)),
        shared,
        Estimate("smddp_fsdp, grad_op", 'SMDDPFSDPStrategy(sharding="grad_op")', in_shares(reshard=False)),
        Estimate("smddp_fsdp, full", '"smddp_fsdp"', in_shares(reshard=True)),
    ]
    if devices > 1:
        estimates += estimate_pipelines(first, sizes, state, devices, limit)
    judged = [replace(one, fits=one.memory is not None and one.memory.total <= limit) for one in estimates]
    return TrainingPlan(type(module).__name__, devices, memory_gb, tuple(judged))


def _profile(first: FirstBatch) -> StepProfile:
    def run() -> torch.Tensor:
        with first.precision():
            result = first.module.training_step(first.batch, *first.arguments)
        return loss_of(result)

    try:
        return profile_step(run, first.module)
    except SplitError as error:  # of `loss_of`
        raise UnplannableError(str(error)) from None


def _bytes(found: Iterable[torch.Tensor]) -> int:
    """Memory that several share is counted once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in found}
    return sum(sizes.values())
