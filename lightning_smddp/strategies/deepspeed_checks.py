"""What DeepSpeed cannot do, said before it does something else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch.optim import Optimizer

from lightning_smddp.sharding.optimizer_trial import Granularity, granularity
from lightning_smddp.strategies.nonfinite import is_changed_hook
from lightning_smddp.strategies.option_checks import OptionGroups, refuse_moved
from lightning_smddp.strategies.options import ReliabilityOptions

_NAME = "strategy='smddp_deepspeed'"
_CHANGING = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning")
_INSTEAD = {
    "backward": "return the loss that you want from training_step",
    "configure_gradient_clipping": "write Trainer(gradient_clip_val=...), a norm",
}


def require_known_to_deepspeed(strategy: Any, given: Mapping[str, Any], groups: OptionGroups) -> None:
    """Raise ``TypeError`` for arguments that neither the strategy nor Lightning's ``DeepSpeedStrategy`` has."""
    refuse_moved(strategy, given, groups)
    known: set[str] = set()
    for cls in type(strategy).__mro__:
        if "__init__" in vars(cls):
            known |= set(signature(vars(cls)["__init__"]).parameters)
        if cls.__name__ == "DeepSpeedStrategy":  # what it hands on to its base class has a name there
            break
    for name in sorted(set(given) - known):
        close = get_close_matches(name, known, 1, cutoff=0.75)
        hint = "It takes those of Lightning's DeepSpeedStrategy."
        if close:
            hint = f"Did you mean {close[0]!r}?"
        raise TypeError(f"{type(strategy).__name__} has no argument {name!r}. {hint}")


def require_checkpoint(checkpoint: Any, resume: str | None, reliability: ReliabilityOptions) -> None:
    """Raise ``ValueError`` if the options on checkpoints do not go together."""
    if checkpoint not in ("file", "directory"):
        raise ValueError(
            f"checkpoint={checkpoint!r} is unknown. Valid: 'file' (one plain file, for any strategy), 'directory' "
            "(DeepSpeed's own, of each rank's part)."
        )
    if reliability.sharded:
        raise ValueError(f"sharded=True is for this package's directories: {_NAME} has checkpoint='directory'.")
    if checkpoint == "directory" and (resume == "auto" or reliability.async_save):
        raise ValueError(
            f"checkpoint='directory' is written by DeepSpeed, so resume={resume!r} and "
            f"async_save={reliability.async_save} would have no effect. Use checkpoint='file', or leave them out."
        )


def require_supported_module(module: Any, trainer: Any, callbacks: Iterable[Any]) -> None:
    """Raise ``ValueError`` if a module that is about to be trained, or its Trainer, asks for what would not happen."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} has automatic_optimization=False. DeepSpeed decides by itself when gradients are complete, so "
            f"{_NAME} cannot be used. Use strategy='smddp', or let Lightning take the steps."
        )
    for hook, cure in _INSTEAD.items():
        if is_changed_hook(module, hook):
            raise ValueError(
                f"{name}.{hook} would not be used: DeepSpeed does that itself. To use {_NAME}, {cure}; "
                "strategy='smddp' uses the hook."
            )
    for callback in callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if names.intersection(_CHANGING):
            raise ValueError(
                f"{type(callback).__name__} averages or replaces whole parameters, of which each rank has a part with "
                f"{_NAME}. Leave it out, or use strategy='smddp'."
            )
    for key, parameter in module.named_parameters():
        if parameter.ndim == 0 and not hasattr(parameter, "ds_id"):
            raise ValueError(
                f"The parameter {key!r} of {name} has no dimension, and DeepSpeed cannot send such a one. Give it one: "
                f"nn.Parameter(torch.tensor([{parameter.item():g}]))."
            )
    if trainer.gradient_clip_algorithm == "value" and trainer.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_algorithm='value' (gradient_clip_val={trainer.gradient_clip_val}): DeepSpeed clips by norm "
            f"alone. Leave gradient_clip_algorithm out, or use strategy='smddp' in place of {_NAME}."
        )


def require_one_answer(config: Mapping[str, Any], trainer: Any) -> None:
    """Raise ``ValueError`` if DeepSpeed's configuration and the Trainer differ on what both can say."""
    clipping, given = config.get("gradient_clipping"), trainer.gradient_clip_val
    if clipping is not None and given is not None and clipping != given:
        raise ValueError(
            f"config={{'gradient_clipping': {clipping!r}}} and Trainer(gradient_clip_val={given!r}) differ. "
            "Give one of them."
        )
    for bits, key in (("16", "fp16"), ("bf16", "bf16")):
        if config.get(key, {}).get("enabled") is True and not str(trainer.precision).startswith(f"{bits}-"):
            raise ValueError(
                f"config={{{key!r}: {{'enabled': True}}}} and Trainer(precision={trainer.precision!r}) differ, so "
                f"inputs would have another type than parameters. Write Trainer(precision='{bits}-mixed')."
            )


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` unless an optimizer treats each element of a parameter by itself."""
    if type(optimizer).__module__.startswith("deepspeed."):
        return  # DeepSpeed knows its own
    found, why = granularity(optimizer)
    if found is not Granularity.ELEMENT:
        raise ValueError(
            f"{type(optimizer).__name__} cannot be used with {_NAME}: DeepSpeed cuts the parameters of a group into "
            f"equal parts, wherever that is, and {why}. Use SMDDPStrategy(shard='optimizer'), or an optimizer such as "
            "AdamW."
        )
