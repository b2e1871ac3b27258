"""Parameters of SageMaker's model parallel library, version 2 (``torch.sagemaker``), also as SDK 3's ``SMP``.

That version shards parameters (FSDP) and has no pipelines; without sharding it is data parallelism. Source: AWS page
``distributed-model-parallel-v2-reference``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_smddp.sagemaker.keys import Key, Reading

_CUTS_LAYERS = "Divide whole layers over so many ranks: pipeline_parallel_size=(that number)."
_OFFLOADING = "has a meaning for FSDP's checkpointed layers only; here activation_checkpointing=True of smddp_pipeline"

KEYS: dict[str, Key] = {
    "hybrid_shard_degree": Key(
        (0, 1),
        "shards parameters over so many ranks, which smddp and smddp_pipeline do not. Divide the layers over them "
        "instead: pipeline_parallel_size=(that number); or use Lightning's "
        "FSDPStrategy(sharding_strategy='HYBRID_SHARD').",
        ("pipeline_parallel_size",),
    ),
    "tensor_parallel_degree": Key((1,), f"cuts single layers. {_CUTS_LAYERS}", ("pipeline_parallel_size",)),
    "expert_parallel_degree": Key((1,), f"spreads experts. {_CUTS_LAYERS}", ("pipeline_parallel_size",)),
    "context_parallel_degree": Key(
        (1,),
        "cuts the sequence, which nothing here does. For memory: smddp_pipeline with activation_checkpointing=True and "
        "more num_microbatches.",
        ("pipeline_parallel_size",),
    ),
    "sm_activation_offloading": Key(note=_OFFLOADING),
    "activation_loading_horizon": Key(note=_OFFLOADING),
    "fsdp_cache_flush_warnings": Key(note="is about FSDP only"),
    "allow_empty_shards": Key(note="is about FSDP only"),
    "random_seed": Key(note="seeds tensor and expert parallelism only; lightning.seed_everything() seeds the rest"),
}


def read(parameters: Mapping[str, Any], reading: Reading) -> str:
    """Turn the parameters into options, in ``reading``; returns the strategy's name."""
    reading.look_up(KEYS, parameters)
    if parameters.get("hybrid_shard_degree", 0) == 0:
        reading.notes.append(
            "hybrid_shard_degree: SMP leaves sharding to FSDP in the script; here every rank keeps all parameters, "
            "unless pipeline_parallel_size is given"
        )
    return "smddp"
