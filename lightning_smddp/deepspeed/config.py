"""DeepSpeed's configuration: a dict that belongs to one run, complete, and without what would compile on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

STAGES = (1, 2, 3)
BUCKET_ON_CPU = 2**22  # elements
_ADAMS = ("adam", "adamw")

# In place of DeepSpeed's 50 million to a billion: with those a smaller model is gathered, and its gradients are
# copied, as a whole, so that a rank holds more than without sharding. Ranks that share memory need no large messages.
_SIZES_ON_CPU = {
    "reduce_bucket_size": BUCKET_ON_CPU,
    "allgather_bucket_size": BUCKET_ON_CPU,
    "stage3_prefetch_bucket_size": BUCKET_ON_CPU,
    "stage3_max_live_parameters": BUCKET_ON_CPU,
    "stage3_max_reuse_distance": BUCKET_ON_CPU,
}


def own(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """A copy of the user's ``config``, which Lightning writes into. DeepSpeed takes any client optimizer then.

    Raises:
        ValueError: it shards nothing, or holds what belongs to the Trainer.
    """
    if config is None:
        return None
    config = copy.deepcopy(config)
    require_stage(config.get("zero_optimization", {}).get("stage", 0), "config={'zero_optimization': {'stage': ...}}")
    if "gradient_accumulation_steps" in config:
        steps = config["gradient_accumulation_steps"]
        raise ValueError(
            f"config={{'gradient_accumulation_steps': {steps!r}}} is the Trainer's to say: leave it out, and write "
            f"Trainer(accumulate_grad_batches={steps!r})."
        )
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)  # DeepSpeed's own compiles; torch's can be offloaded, too
    return config


def require_stage(stage: Any, where: str = "stage") -> None:
    """Raise ``ValueError`` unless DeepSpeed shards something."""
    if stage not in STAGES or isinstance(stage, bool):
        raise ValueError(
            f"{where} is {stage!r}. Valid: 1 (optimizer states are sharded), 2 (and gradients), 3 (and parameters). "
            "To shard nothing, use strategy='smddp'."
        )


def for_cpu(config: dict[str, Any], given: Collection[str]) -> None:
    """Have small buckets, but for sizes that are ``given``, and torch's Adam.

    DeepSpeed's own Adam compiles for minutes. It is taken where ``config`` says ``torch_adam: false``.
    """
    zero = config["zero_optimization"]
    for name, size in _SIZES_ON_CPU.items():
        if name not in given:
            zero[name] = size
    optimizer = config.get("optimizer", {})
    if str(optimizer.get("type", "")).lower() in _ADAMS:
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
