"""What ``smddp_fsdp``, ``smddp_deepspeed`` and a pipeline cannot do, said at start by name, with the cure.

And which hooks are the user's own, where that decides what may be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from lightning_smddp.pipeline.partition.microbatches import looks_at_other_rows
from lightning_smddp.pytree import leaves
from lightning_smddp.sharding.optimizer_shards import all_parameters, unwrapped
from lightning_smddp.sharding.optimizer_trial import why_not_elementwise, why_not_one_by_one
from lightning_smddp.sharding.sharded_optimizers import shards_itself
from lightning_smddp.wording import USE_INSTEAD, counted

_SPARSE = (nn.Embedding, nn.EmbeddingBag)
_NAME = "strategy='smddp_deepspeed'"
_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}


def require_supported_by_fsdp(module: nn.Module, callbacks: Iterable[Any] = (), may_average: bool = True) -> None:
    """Raise ``ValueError`` for what divided parameters cannot do; ``may_average``: weights, in callbacks."""
    for name, part in module.named_modules():
        if isinstance(part, _SPARSE) and part.sparse:
            raise ValueError(
                f"{name} has sparse gradients, which FSDP2 does not sum. Use sparse=False, or strategy='smddp'."
            )
    for callback in callbacks:
        names = _class_names(callback)
        if "ModelPruning" in names:
            raise ValueError(f"{type(callback).__name__} replaces parameters, which are divided. Use strategy='smddp'.")
        if names & _AVERAGING and not may_average:
            raise ValueError(
                f"{type(callback).__name__} copies the module before meta_init=True gives its layers memory, and puts "
                "whole weights of its own into checkpoints, which sharded=True saves as shares. Leave these out."
            )


def require_optimizers_of(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """Raise ``ValueError`` if an optimizer has parameters that are not those of the divided ``modules``."""
    known = {parameter for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        if not known.issuperset(all_parameters(optimizer)):
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of no module that was set up, or had them before it was "
                "divided among ranks: it would train nothing. Make it in `configure_optimizers`, or by `fabric.setup`."
            )


def require_supported_by_deepspeed(module: Any, callbacks: Iterable[Any]) -> None:
    """Raise ``ValueError`` if a module that is about to be trained, or a callback, asks for what would not happen."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(f"{name} has automatic_optimization=False, which DeepSpeed cannot do. Use strategy='smddp'.")
    for callback in callbacks:
        if _class_names(callback) & {*_AVERAGING, "ModelPruning"}:
            kind = type(callback).__name__
            raise ValueError(f"{kind} averages or replaces whole parameters, which are divided. Use strategy='smddp'.")
    for key, parameter in module.named_parameters():
        if parameter.ndim == 0 and not hasattr(parameter, "ds_id"):
            raise ValueError(
                f"The parameter {key!r} of {name} has no dimension, and DeepSpeed cannot send such a one. Give it one: "
                f"nn.Parameter(torch.tensor([{parameter.item():g}]))."
            )


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` unless an optimizer treats each element of a parameter by itself."""
    if type(optimizer).__module__.startswith("deepspeed."):
        return  # DeepSpeed knows its own
    why = why_not_elementwise(optimizer)
    if why is not None:
        name = type(optimizer).__name__
        raise ValueError(f"{name} cannot be used with {_NAME}: {why}. Use AdamW, or SMDDPStrategy(shard='optimizer').")


def refusal_of_training(module: Any, callbacks: Iterable[Any], optimizers: Sequence[Any]) -> str | None:
    """Why a pipeline cannot train ``module``, as far as that is known before its first batch; None if it can."""
    name = type(module).__name__
    if not module.automatic_optimization:
        return f"{name} uses manual optimization (automatic_optimization=False): a pipeline takes the steps itself."
    if len(optimizers) > 1:
        return (
            f"{name} has {counted(len(optimizers), 'optimizer')}: a pipeline's step has one backward and one optimizer."
        )
    for optimizer in map(unwrapped, optimizers):
        if shards_itself(optimizer):
            kind = type(optimizer).__name__
            return (
                f"{kind} sends each parameter to all ranks. Use PipelineStrategy(shard='optimizer') with what it wraps."
            )
        why = why_not_one_by_one(optimizer)
        if why is not None:
            return f"{type(optimizer).__name__} cannot step the parameters of a stage by themselves: {why}. AdamW can."
    for callback in callbacks:
        names = _class_names(callback)
        if "ModelPruning" in names:
            why = "replaces parameters of the module while it trains, and a pipeline has divided those that it had"
        elif "StochasticWeightAveraging" in names and looks_at_other_rows(module):
            why = "runs training steps forward only, for the statistics of BatchNorm; a pipeline's go backward too"
        else:
            continue
        return f"{type(callback).__name__} {why}."
    return None


def refuse_training(module: Any, callbacks: Iterable[Any], optimizers: Sequence[Any]) -> None:
    """Raise ``ValueError`` if a pipeline cannot train ``module``, with what can."""
    reason = refusal_of_training(module, callbacks, optimizers)
    if reason is not None:
        raise ValueError(f"{reason} {USE_INSTEAD}")


def require_batches(module: Any) -> None:
    """Raise ``ValueError`` if a step of ``module`` fetches its batches itself, which a pipeline has to see."""
    for hook in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, hook)
        if step is not None and "dataloader_iter" in signature(step).parameters:
            raise ValueError(f"{type(module).__name__}.{hook} takes `dataloader_iter`. Let it take `batch` instead.")


def require_samplers_of_replicas(loaders: Any, num_replicas: int) -> None:
    """Raise ``ValueError`` if a ``DistributedSampler`` of the user's own takes each rank for a replica."""
    for loader in leaves(loaders):
        for attribute in ("sampler", "batch_sampler"):
            sampler = getattr(loader, attribute, None)
            if isinstance(sampler, DistributedSampler) and sampler.num_replicas != num_replicas:
                raise ValueError(
                    f"The DataLoader's DistributedSampler has num_replicas={sampler.num_replicas}, but there are "
                    f"{num_replicas} replicas, as all ranks of a pipeline work on one batch. Leave the sampler to "
                    "Lightning, or make it with `DistributedSampler(dataset, **trainer.distributed_sampler_kwargs)`."
                )


def callbacks_of(trainer: Any) -> list[Any]:
    """The Trainer's callbacks, which it declares nowhere."""
    return list(trainer.callbacks)


def _class_names(callback: Any) -> set[str]:
    """Of its class and those that it is made of: Lightning's are found by name, as there are two packages of it."""
    return {cls.__name__ for cls in type(callback).__mro__}


def is_changed_hook(owner: Any, hook: str, own: tuple[str, ...] = ("lightning.", "pytorch_lightning.")) -> bool:
    """Whether ``owner`` has a hook of the user's, which none of the packages or modules ``own`` defines."""
    module = getattr(getattr(owner, hook, None), "__module__", None)
    return not str(module).startswith(own)


def has_changed(trainer: Any, *hooks: str) -> bool:
    """Whether the user's module, data, or a callback has one of ``hooks`` in place of Lightning's own."""
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks)
    return any(hasattr(owner, hook) and is_changed_hook(owner, hook) for owner in owners for hook in hooks)


def may_have_changed_gradients(trainer: Any) -> bool:
    """Whether code of the user's may have written them between the backward pass and the look at them."""
    if not trainer.lightning_module.automatic_optimization:
        return True
    return has_changed(trainer, "on_after_backward", "backward", "optimizer_step")


def zeroes_as_usual(trainer: Any) -> bool:
    """Whether nobody looks at gradients between the step and their end in ``zero_grad``."""
    return not has_changed(trainer, "on_before_zero_grad", "optimizer_zero_grad")


def arrives_as_expected(trainer: Any) -> bool:
    """Whether nobody but Lightning has the loss in its hands between the step and its backward pass."""
    plugin = trainer.precision_plugin
    if has_changed(trainer, "backward", "on_before_backward"):
        return False
    if is_changed_hook(plugin, "backward") or is_changed_hook(plugin, "pre_backward"):
        return False
    scaler = getattr(plugin, "scaler", None)
    return scaler is None or type(scaler) in (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
