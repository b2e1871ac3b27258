"""What ``smddp_fsdp`` cannot do, said by name, with the cure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_smddp.communication.consistency import require_initialized

_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def require_supported(module: nn.Module, callbacks: Iterable[Any], is_fit: bool) -> None:
    """Raise ``ValueError`` for what cannot be trained with divided parameters."""
    require_initialized(module)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has parameters that are DTensors: an earlier run could not gather them, or the "
            "module divides them itself, in `configure_model`. Make a new module, and leave the dividing to "
            "strategy='smddp_fsdp'."
        )
    for callback in callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if is_fit and names.intersection(_AVERAGING):
            raise ValueError(
                f"{type(callback).__name__} keeps a whole copy of the module on each rank, which "
                "strategy='smddp_fsdp' divides. Leave it out, or use strategy='smddp' with shard='optimizer'."
            )
        if is_fit and "ModelPruning" in names:
            raise ValueError(
                f"{type(callback).__name__} replaces parameters of the module while it trains, which "
                "strategy='smddp_fsdp' has divided. Leave it out, or use strategy='smddp'."
            )


def require_optimizers_of_module(module: nn.Module, optimizers: Sequence[Any]) -> None:
    """Raise ``ValueError`` if an optimizer has parameters that are not the module's any more."""
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise ValueError(
                    f"{type(optimizer).__name__} has parameters that are not in {type(module).__name__}, or were "
                    "taken from it before they were divided among ranks: it would train nothing. Make it in "
                    "`configure_optimizers`, from `self.parameters()` or those of submodules."
                )


def unit_precision(plugin: Any) -> MixedPrecisionPolicy:
    """In which dtype units are gathered. Raises ``ValueError`` for precisions that cannot be used."""
    name = type(plugin).__name__
    if name not in _PRECISIONS:
        raise ValueError(
            f"The precision plugin {name} cannot be used with strategy='smddp_fsdp'. Valid: precision='32-true', "
            "'bf16-mixed', '16-mixed', 'bf16-true', '16-true', '64-true'."
        )
    dtype = _MIXED.get(str(plugin.precision))
    if dtype is None:
        return MixedPrecisionPolicy()
    # The user's step runs in autocast, which would keep a copy in 16 bits of each weight until the backward pass:
    # weights that come in 16 bits are not copied.
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
