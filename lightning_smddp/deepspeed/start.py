"""How DeepSpeed is started: installed, with its device and a configuration of this run's, and nothing compiled unasked.

The configuration is a dict that belongs to one run, complete, and without what would compile on a CPU.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

INSTALL = "pip install 'lightning-smddp[deepspeed]'"
_SHARED_MEMORY_OP = "deepspeed_shm_comm"

_STAGES = (1, 2, 3)
_ADAMS = ("adam", "adamw")

# In place of DeepSpeed's 50 million to a billion: with those a smaller model is gathered, and its gradients are
# copied, as a whole, so that a rank holds more than without sharding. Ranks of a node need no large messages.
_ELEMENTS_ON_CPU = 2**22
_SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)


def require_deepspeed() -> None:
    """Raise ``ModuleNotFoundError`` unless DeepSpeed can be imported."""
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError(f"strategy='smddp_deepspeed' needs DeepSpeed, an optional extra. Run: {INSTALL}")


def use_device(device: torch.device) -> None:
    """Let DeepSpeed compute on ``device``: it takes a GPU wherever it finds one.

    On a CPU it would compile collectives of its own, in C++, as soon as it joins a process group; the backend's do.
    """
    if device.type != "cpu":
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Only now: DeepSpeed settles on an accelerator once, while it is imported, and looks at the variable then.
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() != "cpu":  # imported before, or the user's variable
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False


def take_up_writes(engine: Any) -> bool:
    """What the user's code has written to parameters since the last step holds, as in one process. Whether it does.

    Stages 1 and 2 step a copy of each rank's part in fp32, and would undo it. Where parameters are in 16 bits, the copy
    knows more than they do, and stays.
    """
    zero = engine.optimizer
    flat_groups = getattr(zero, "bit16_groups_flat", ())  # stage 3 has none
    if not flat_groups or zero.cpu_offload or any(group.dtype != torch.float32 for group in flat_groups):
        return False
    zero.refresh_fp32_params()
    return True


class UnseenWrites:
    """Finds parameters that were written to in place since the last step, by torch's count of such writes.

    DeepSpeed itself gives parameters other memory, which does not count. Nor does what is written through ``.data``.

    Args:
        module: whose parameters are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.note()

    def note(self) -> None:
        """Behind a step: what follows counts."""
        self._versions = {name: parameter._version for name, parameter in self._module.named_parameters()}

    def require_none(self) -> None:
        """Before a step. Raises ``ValueError`` if a parameter was written to."""
        for name, parameter in self._module.named_parameters():
            if parameter._version != self._versions.get(name, parameter._version):
                raise ValueError(
                    f"{name}: written to since the last step, in a hook, say. DeepSpeed steps a copy of its own here "
                    "(in stage 3, and in 16 bits), and would undo it. Write with "
                    "`deepspeed.utils.safe_set_full_fp32_param(parameter, value)`, or use stage 1 or 2 with "
                    "precision='32-true'."
                )


def take_hooks_off(engine: Any) -> None:
    """Give the module back at the end of a run: its backward pass is the user's own again. States can still be saved.

    Stage 3 leaves each rank a part of the parameters, which are of no use without DeepSpeed: there its hooks stay.
    """
    if engine.zero_optimization_partition_weights():
        return
    of_gradients = getattr(engine.optimizer, "_grad_acc_hooks", ())
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook, *of_gradients):
        hook.remove()
    if hasattr(engine.optimizer, "unregister_grad_acc_post_hooks"):
        engine.optimizer.unregister_grad_acc_post_hooks()


def own_config(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """A copy of the user's ``config``, which Lightning writes into. DeepSpeed takes any client optimizer then.

    Raises:
        ValueError: it shards nothing.
    """
    if config is None:
        return None
    config = copy.deepcopy(config)
    zero = config.get("zero_optimization", {})
    require_stage(zero.get("stage", 0), "config={'zero_optimization': {'stage': ...}}")
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)  # DeepSpeed's own compiles; torch's can be offloaded, too
    return config


def require_stage(stage: Any, where: str = "stage") -> None:
    """Raise ``ValueError`` unless DeepSpeed shards something."""
    if stage not in _STAGES:
        raise ValueError(
            f"{where} is {stage!r}. Valid: 1 (optimizer states are sharded), 2 (and gradients), 3 (and parameters). "
            "To shard nothing, use strategy='smddp'."
        )


def for_cpu(config: dict[str, Any], given: Collection[str]) -> None:
    """Have small buckets, but for sizes that are ``given``, and torch's Adam.

    DeepSpeed's own Adam compiles for minutes. It is taken where ``config`` says ``torch_adam: false``.
    """
    zero = config["zero_optimization"]
    for name in _SIZES:
        if name not in given:
            zero[name] = _ELEMENTS_ON_CPU
    optimizer = config.get("optimizer", {})
    if str(optimizer.get("type")).lower() in _ADAMS:
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
