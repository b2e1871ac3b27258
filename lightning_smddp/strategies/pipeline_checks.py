"""What a pipeline cannot do, said at start by name, with the cure."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from lightning_smddp._compat.torch import is_compiled_module
from lightning_smddp.bridge.partition_table import looks_at_other_rows
from lightning_smddp.communication.consistency import require_initialized
from lightning_smddp.pipeline.capture.graph import SplitError
from lightning_smddp.sharding.sharded_optimizers import refuse_own_sharding, splits_parameters
from lightning_smddp.strategies.nonfinite import is_changed_hook
from lightning_smddp.strategies.suppress_warning import without_warning
from lightning_smddp.wire.pytree import leaves

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


BEYOND_OPTIMIZER = (
    " Inside a stage gradients and parameters are not sharded: it runs forward and backward once for each micro-batch, "
    "and would send all of them as often. More stages (pipeline_parallel_size, stages_per_rank) divide both; "
    "strategy='smddp_fsdp' shards both, without a pipeline."
)


def require_shardable(optimizers: Iterable[Any], shard: str | None) -> None:
    """Raise ``ValueError`` for optimizers whose work replicas cannot share, or that send parameters by themselves."""
    for optimizer in optimizers:
        refuse_own_sharding(
            optimizer,
            "sends each parameter to all ranks, of which each has others in a pipeline. Return the optimizer that it "
            "wraps from `configure_optimizers`: PipelineStrategy(shard='optimizer') shards it over the replicas.",
        )
        if shard is not None:
            splits_parameters(getattr(optimizer, "optimizer", optimizer))


def callback_against_pipelining(callbacks: Iterable[Any], module: LightningModule, fallback: str) -> str | None:
    """Why the training step is not pipelined with these ``callbacks`` of Lightning's; None if that is no reason.

    Raises:
        SplitError: there is one, and ``fallback`` is "error".
    """
    has_batch_norm = bool(looks_at_other_rows(module))
    for callback in callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if "ModelPruning" in names:
            reason = "replaces parameters of the module while it trains, and a pipeline has divided those that it had."
        elif "StochasticWeightAveraging" in names and has_batch_norm:
            reason = "runs training steps forward only, for the statistics of BatchNorm; a pipeline's go backward too."
        else:
            continue
        if fallback == "error":
            raise SplitError(f"{type(callback).__name__} {reason} Leave it out, or use strategy='smddp'.")
        return f"{type(callback).__name__} {reason}"
    return None


def manual_optimization(module: LightningModule) -> str:
    """Why its training step cannot be pipelined."""
    return (
        f"{type(module).__name__} uses manual optimization (automatic_optimization=False). A pipeline's forward and "
        "backward passes alternate between ranks, so `manual_backward` and `optimizer.step()` cannot be called from "
        "within the step. Use automatic optimization to pipeline it."
    )


def require_supported(module: LightningModule, callbacks: Iterable[Any], is_fit: bool, fallback: str) -> None:
    """Raise ``ValueError`` for what no split can run, unless there is a ``fallback``; warn of what runs otherwise."""
    name = type(module).__name__
    require_initialized(module)
    if is_fit and not module.automatic_optimization and fallback == "error":
        raise ValueError(manual_optimization(module))
    if is_compiled_module(module) and dist.get_rank() == 0:
        warnings.warn(
            f"{name} was compiled with `torch.compile`. A pipeline runs parts of its step on different ranks, so the "
            "step runs as plain Python. Modules that are placed whole can be compiled: call "
            "`self.encoder.compile()` for each of them instead.",
            stacklevel=2,
        )
    for hook in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, hook)
        if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
            raise ValueError(
                f"{name}.{hook} takes `dataloader_iter`. A pipeline has to see the batch to cut it into micro-batches: "
                "take `batch` instead."
            )


@contextmanager
def without_sync_advice(wrong: bool) -> Iterator[None]:
    """With ``wrong``, Lightning does not advise ``sync_dist=True``: all ranks of a pipeline log equal values."""
    with without_warning("It is recommended to use `self.log") if wrong else nullcontext():
        yield


def require_samplers_of_replicas(loaders: Any, num_replicas: int) -> None:
    """Raise ``ValueError`` if a ``DistributedSampler`` of the user's own takes each rank for a replica."""
    for loader in leaves(loaders):
        for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            if isinstance(sampler, DistributedSampler) and sampler.num_replicas != num_replicas:
                raise ValueError(
                    f"The DataLoader's DistributedSampler has num_replicas={sampler.num_replicas}, but there are "
                    f"{num_replicas} replicas: all ranks of a pipeline work on one batch, so the other data would "
                    "never be used. Leave the sampler to Lightning, or make it with "
                    "`DistributedSampler(dataset, **trainer.distributed_sampler_kwargs)`."
                )


def callbacks_of(trainer: Any) -> list[Any]:
    """The Trainer's callbacks, which it declares nowhere."""
    return list(trainer.callbacks)


def zeroes_as_usual(trainer: Any) -> bool:
    """Whether nobody looks at gradients between the step and their end in ``zero_grad``."""
    module = trainer.lightning_module
    changed = [hook for hook in ("on_before_zero_grad", "optimizer_zero_grad") if is_changed_hook(module, hook)]
    return not changed and not any(is_changed_hook(c, "on_before_zero_grad") for c in callbacks_of(trainer))
