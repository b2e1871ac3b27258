"""``lightning_smddp.plan``: for each strategy whether a module fits, what a rank holds, how long a step takes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS

from lightning_smddp.bridge.step import loss_of
from lightning_smddp.choice.estimates import (
    Estimate,
    Sizes,
    UnitSizes,
    data_parallel,
    deepspeed,
    fully_sharded,
    sharded_optimizer,
)
from lightning_smddp.choice.exchange import ExchangeTimes, pass_seconds
from lightning_smddp.choice.first_batch import FirstBatch, UnplannableError, look_at_first_batch
from lightning_smddp.choice.optimizer_profile import OptimizerProfile, profile_optimizers
from lightning_smddp.choice.pipelines import estimate_pipelines
from lightning_smddp.choice.report import as_text
from lightning_smddp.choice.step_profile import StepProfile, profile_step
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.microbatches import rows_of
from lightning_smddp.sharding.optimizer_trial import Granularity, granularity
from lightning_smddp.sharding.units import find_units
from lightning_smddp.wire.pytree import tensors
from lightning_smddp.wording import counted

_GIB = 2**30
_NEARLY = 0.9  # of the fastest one's rows in a second: times are not known better, and simple strategies come first


@dataclass(frozen=True)
class TrainingPlan:
    """What was predicted; ``print`` shows it as a table.

    Attributes:
        module: name of the module's class.
        devices: ranks, on one node.
        memory_gb: GiB that a rank may use.
        estimates: of each strategy, the simplest first.
        notes: what holds for all of them.
        process_bytes: what this process held before the module was looked at, without files.
    """

    module: str
    devices: int
    memory_gb: float
    estimates: tuple[Estimate, ...]
    notes: tuple[str, ...] = ()
    process_bytes: int = 0

    @property
    def best(self) -> Estimate | None:
        """The one to take: of those that fit and train on nearly most rows in a second the first; None if none fits."""
        fitting = [estimate for estimate in self.estimates if estimate.fits]
        fastest = max([estimate.rows_per_s or 0.0 for estimate in fitting], default=0.0)
        return next((estimate for estimate in fitting if (estimate.rows_per_s or 0.0) >= _NEARLY * fastest), None)

    @property
    def trainer(self) -> str | None:
        """The line to write for :attr:`best`."""
        if self.best is None:
            return None
        return f"Trainer(strategy={self.best.strategy}, devices={self.devices})"

    def __str__(self) -> str:
        title = (
            f"{self.module} on {counted(self.devices, 'rank')} of {self.memory_gb:g} GiB, predicted from a CPU trace"
        )
        text = as_text(title, self.estimates, self.notes, self.process_bytes)
        return f"{text}\n\n{self._advice()}"

    def _advice(self) -> str:
        if self.trainer is not None:
            return self.trainer
        needed = [estimate.memory.total for estimate in self.estimates if estimate.memory is not None]
        return (
            f"No strategy fits {self.memory_gb:g} GiB a rank; the least is {min(needed) / _GIB:.2f} GiB. Use more "
            "devices, or a smaller batch."
        )


def plan(module: Any, devices: int, memory_gb: float, datamodule: Any = None, precision: Any = None) -> TrainingPlan:
    """Say which strategy trains ``module``: what a rank of each holds, and how long a step takes.

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
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise UnplannableError(f"devices={devices!r} has to be a number from 1: the ranks to train on.")
    if not isinstance(memory_gb, (int, float)) or not 0 < memory_gb < math.inf:
        raise UnplannableError(f"memory_gb={memory_gb!r} has to be positive: the GiB that a rank may use.")
    found: list[TrainingPlan] = []
    # What the module's parameters take is no part of what each process has anyway.
    held = _bytes(list(module.parameters())) if isinstance(module, nn.Module) else 0
    before = _anonymous_bytes()
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, _cores() // devices))
    try:
        look_at_first_batch(
            module, datamodule, precision, lambda first: found.append(_planned(first, devices, memory_gb))
        )
    finally:
        torch.set_num_threads(threads)
    return replace(found[0], process_bytes=max(0, before - held))


def _anonymous_bytes() -> int:
    """Of this process's memory what no file has."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _planned(first: FirstBatch, devices: int, memory_gb: float) -> TrainingPlan:
    limit = memory_gb * _GIB
    step = _profile(first)
    optimizers = profile_optimizers(first.optimizers)
    sizes = _sizes(first, optimizers)
    rows = devices * rows_of(first.batch)
    crowded = max(1.0, devices / _cores())
    units = _units(first.module)
    exchange = ExchangeTimes(sizes, devices, pass_seconds())
    least = step.seconds + optimizers.fixed_seconds
    whole, share = least + optimizers.seconds, least + optimizers.seconds / devices
    cases = [
        ("smddp", '"smddp"', data_parallel(sizes, step, devices), whole + exchange.data_parallel()),
        (
            "smddp, shard='optimizer'",
            'SMDDPStrategy(shard="optimizer")',
            sharded_optimizer(sizes, step, devices),
            share + exchange.sharded_optimizer(),
        ),
    ]
    for sharding, strategy in (("full", '"smddp_fsdp"'), ("grad_op", 'SMDDPFSDPStrategy(sharding="grad_op")')):
        reshard = sharding == "full"
        memory = fully_sharded(sizes, step, devices, units, reshard)
        cases.append((f"smddp_fsdp, {sharding}", strategy, memory, share + exchange.fully_sharded(reshard)))
    if _is_32_bit(first):
        for stage in (1, 2, 3):
            name = f"smddp_deepspeed_stage_{stage}"
            seconds = share + exchange.deepspeed(stage)
            cases.append((name, f'"{name}"', deepspeed(sizes, step, devices, stage), seconds))
    reasons = _refusals(first)
    estimates = []
    for name, strategy, memory, seconds in cases:
        refused = next((why for prefix, why in reasons.items() if name.startswith(prefix)), None)
        if refused is not None:
            estimates.append(Estimate(name, strategy, notes=(refused,)))
        else:
            estimates.append(Estimate(name, strategy, memory, crowded * seconds, rows, memory.total <= limit))
    if devices > 1:
        for estimate in estimate_pipelines(first, sizes, optimizers.state, devices, limit):
            if estimate.step_s is not None:
                stepping = optimizers.fixed_seconds + optimizers.seconds / devices
                seconds = crowded * (estimate.step_s + stepping)
                estimate = replace(estimate, step_s=seconds)
            estimates.append(estimate)
    name = type(first.module).__name__
    return TrainingPlan(name, devices, memory_gb, tuple(estimates), optimizers.notes)


def _is_32_bit(first: FirstBatch) -> bool:
    """DeepSpeed casts parameters by itself, so where they are not trained in 32 bits nothing is predicted of it."""
    with first.precision():
        casts = torch.is_autocast_enabled("cpu")
    return not casts and all(parameter.dtype == torch.float32 for parameter in first.module.parameters())


def _refusals(first: FirstBatch) -> dict[str, str]:
    """By the begin of a strategy's name why the module's optimizers cannot be used with it."""
    reasons = {}
    for optimizer in first.optimizers:
        found, why = granularity(optimizer)
        name = type(optimizer).__name__
        if found is Granularity.NONE or isinstance(optimizer, LBFGS):
            reasons["smddp, shard"] = f"{name} cannot be shared: {why or 'it needs all gradients at once'}"
        if found is not Granularity.ELEMENT:
            reasons["smddp_deepspeed"] = f"DeepSpeed cuts parameters anywhere, and of {name} it is not known: {why}"
    if len(first.optimizers) > 1:
        reasons["smddp_deepspeed"] = f"DeepSpeed takes one optimizer, and there are {len(first.optimizers)}"
    if find_spec("deepspeed") is None:
        reasons["smddp_deepspeed"] = "it is not installed: pip install 'lightning-smddp[deepspeed]'"
    return reasons


def _profile(first: FirstBatch) -> StepProfile:
    def run() -> torch.Tensor:
        with first.precision():
            result = first.module.training_step(first.batch, *first.arguments)
        return loss_of(result)

    try:
        return profile_step(run, first.module)
    except SplitError as error:  # of `loss_of`
        raise UnplannableError(str(error)) from None


def _sizes(first: FirstBatch, optimizers: OptimizerProfile) -> Sizes:
    parameters = list(first.module.parameters())
    return Sizes(
        parameters=_bytes(parameters),
        buffers=_bytes(list(first.module.buffers())),
        gradients=_bytes([parameter for parameter in parameters if parameter.requires_grad]),
        state=sum(optimizers.state.values()),
        optimizer_temporary=optimizers.temporary,
        batch=_bytes(tensors(first.batch)),
    )


def _units(module: nn.Module) -> UnitSizes:
    """What ``smddp_fsdp`` gathers together."""
    sizes = [_bytes(list(module.get_submodule(name).parameters())) for name in find_units(module).names]
    units = sum(sizes)
    return UnitSizes(units, max(sizes, default=0), _bytes(list(module.parameters())) - units)


def _bytes(found: Sequence[torch.Tensor]) -> int:
    """Memory that several share is counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in found}.values())
