"""What DeepSpeed cannot do, said before it does something else."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_smddp.sharding.optimizer_trial import Granularity, granularity
from lightning_smddp.strategies.nonfinite import is_changed_hook

_NAME = "strategy='smddp_deepspeed'"
_INSTEAD = {
    "backward": "return the loss that you want from training_step",
    "configure_gradient_clipping": "write Trainer(gradient_clip_val=...), a norm",
}


def require_supported_module(module: Any, trainer: Any) -> None:
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


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` unless an optimizer treats each element of a parameter by itself."""
    found, why = granularity(optimizer)
    if found is not Granularity.ELEMENT:
        raise ValueError(
            f"{type(optimizer).__name__} cannot be used with {_NAME}: DeepSpeed cuts the parameters of a group into "
            f"equal parts, wherever that is, and {why}. Use SMDDPStrategy(shard='optimizer'), or an optimizer such as "
            "AdamW."
        )
