"""``lightning_smddp.plan``: for each strategy whether a module fits, what a rank holds, how long a step takes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
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
    Memory,
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
from lightning_smddp.deepspeed.start import STAGES
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.pipeline.partition.microbatches import rows_of
from lightning_smddp.pytree import tensors
from lightning_smddp.sharding.optimizer_trial import Granularity, granularity
from lightning_smddp.sharding.units import find_units
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
        fitting = []
        fastest = 0.0
        for estimate in self.estimates:
            if estimate.fits:
                rows_per_s = estimate.rows_per_s or 0.0
                fitting.append((rows_per_s, estimate))
                fastest = max(fastest, rows_per_s)
        for rows_per_s, estimate in fitting:
            if rows_per_s >= _NEARLY * fastest:
                return estimate
        return None

    @property
    def trainer(self) -> str | None:
        """The line to write for :attr:`best`."""
        if self.best is None:
            return None
        return f"Trainer(strategy={self.best.strategy}, devices={self.devices})"

    def __str__(self) -> str:
        ranks = counted(self.devices, "rank")
        title = f"{self.module} on {ranks} of {self.memory_gb:g} GiB, predicted from a CPU trace"
        table = as_text(title, self.estimates, self.notes, self.process_bytes)
        return f"{table}\n\n{self._advice()}"

    def _advice(self) -> str:
        if self.trainer is not None:
            return self.trainer
        needed = [estimate.memory.total for estimate in self.estimates if estimate.memory is not None]
        least = min(needed) / _GIB
        return (
            f"No strategy fits {self.memory_gb:g} GiB a rank; the least is {least:.2f} GiB. Use more devices, or a "
            "smaller batch."
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
    # What the module's parameters take is no part of what each process has anyway.
    process_bytes = _anonymous_bytes()
    if isinstance(module, nn.Module):
        process_bytes = max(0, process_bytes - _bytes(module.parameters()))
    found: list[TrainingPlan] = []

    def look(first: FirstBatch) -> None:
        found.append(_planned(first, devices, memory_gb))

    # All ranks share this machine's cores, so times are taken on as many as one of them will have.
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, _cores() // devices))
    try:
        look_at_first_batch(module, datamodule, precision, look)
    finally:
        torch.set_num_threads(threads)
    return replace(found[0], process_bytes=process_bytes)


def _anonymous_bytes() -> int:
    """Of this process's memory what no file has."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            kibibytes = line.split()[1]
            return 1024 * int(kibibytes)
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _planned(first: FirstBatch, devices: int, memory_gb: float) -> TrainingPlan:
    limit = memory_gb * _GIB
    step = _profile(first)
    optimizers = profile_optimizers(first.optimizers)
    sizes = _sizes(first, optimizers)
    rows = devices * rows_of(first.batch)
    crowded = max(1.0, devices / _cores())  # times longer, where ranks have to take turns on the cores
    reasons = _refusals(first)
    estimates = []
    for case in _cases(first, sizes, step, optimizers, devices):
        refusals = [why for prefix, why in reasons.items() if case.name.startswith(prefix)]
        if refusals:
            estimates.append(Estimate(case.name, case.strategy, notes=(refusals[0],)))
            continue
        estimate = Estimate(
            case.name,
            case.strategy,
            case.memory,
            step_s=crowded * case.seconds,
            rows=rows,
            fits=case.memory.total <= limit,
        )
        estimates.append(estimate)
    if devices > 1:
        for estimate in estimate_pipelines(first, sizes, optimizers.state, devices, limit):
            if estimate.step_s is not None:
                stepping = optimizers.fixed_seconds + optimizers.seconds / devices
                seconds = crowded * (estimate.step_s + stepping)
                estimate = replace(estimate, step_s=seconds)
            estimates.append(estimate)
    name = type(first.module).__name__
    return TrainingPlan(name, devices, memory_gb, tuple(estimates), optimizers.notes)


@dataclass(frozen=True)
class _Case:
    """A strategy of one stage, as predicted with a core for each rank.

    Attributes:
        name, strategy: see :class:`~lightning_smddp.choice.estimates.Estimate`.
        memory: of a rank.
        seconds: of a step.
    """

    name: str
    strategy: str
    memory: Memory
    seconds: float


def _cases(
    first: FirstBatch, sizes: Sizes, step: StepProfile, optimizers: OptimizerProfile, devices: int
) -> list[_Case]:
    """The strategies that do not cut the step, with what a rank holds and a step takes; the simplest first."""
    exchange = ExchangeTimes(sizes, devices, pass_seconds())
    units = _units(first.module)
    # What a rank computes: everything but the exchange, with the optimizer's step of all parameters or of a share.
    least = step.seconds + optimizers.fixed_seconds
    whole = least + optimizers.seconds
    share = least + optimizers.seconds / devices
    cases = [
        _Case(
            "smddp",
            '"smddp"',
            data_parallel(sizes, step, devices),
            whole + exchange.data_parallel(),
        ),
        _Case(
            "smddp, shard='optimizer'",
            'SMDDPStrategy(shard="optimizer")',
            sharded_optimizer(sizes, step, devices),
            share + exchange.sharded_optimizer(),
        ),
        _Case(
            "smddp_fsdp, full",
            '"smddp_fsdp"',
            fully_sharded(sizes, step, devices, units, reshard=True),
            share + exchange.fully_sharded(reshard=True),
        ),
        _Case(
            "smddp_fsdp, grad_op",
            'SMDDPFSDPStrategy(sharding="grad_op")',
            fully_sharded(sizes, step, devices, units, reshard=False),
            share + exchange.fully_sharded(reshard=False),
        ),
    ]
    if _is_32_bit(first):
        for stage in STAGES:
            name = f"smddp_deepspeed_stage_{stage}"
            memory = deepspeed(sizes, step, devices, stage)
            cases.append(_Case(name, f'"{name}"', memory, share + exchange.deepspeed(stage)))
    return cases


def _is_32_bit(first: FirstBatch) -> bool:
    """DeepSpeed casts parameters by itself, so where they are not trained in 32 bits nothing is predicted of it."""
    with first.precision():
        casts = torch.is_autocast_enabled("cpu")
    if casts:
        return False
    return all(parameter.dtype == torch.float32 for parameter in first.module.parameters())


def _refusals(first: FirstBatch) -> dict[str, str]:
    """By the begin of a strategy's name why the module's optimizers cannot be used with it."""
    reasons = {}
    # One strategy may have several reasons: the last one that is found is shown.
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
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return Sizes(
        parameters=_bytes(parameters),
        buffers=_bytes(first.module.buffers()),
        gradients=_bytes(trained),
        state=sum(optimizers.state.values()),
        optimizer_temporary=optimizers.temporary,
        batch=_bytes(tensors(first.batch)),
    )


def _units(module: nn.Module) -> UnitSizes:
    """What ``smddp_fsdp`` gathers together."""
    sizes = []
    for name in find_units(module).names:
        unit = module.get_submodule(name)
        sizes.append(_bytes(unit.parameters()))
    units = sum(sizes)
    root = _bytes(module.parameters()) - units
    return UnitSizes(units, max(sizes, default=0), root)


def _bytes(found: Iterable[torch.Tensor]) -> int:
    """Memory that several share is counted once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in found}
    return sum(sizes.values())
