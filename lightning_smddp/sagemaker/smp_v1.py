"""Parameters of SageMaker's model parallel library, version 1 (``smdistributed.modelparallel`` up to 1.15).

Source: SageMaker Python SDK 2, documentation of ``distribution["smdistributed"]["modelparallel"]["parameters"]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_smddp.sagemaker.keys import Key, Reading

_SHARDED = (
    "shards parameters over ranks, which smddp and smddp_pipeline do not. Divide the layers instead with "
    "pipeline_parallel_degree, or use Lightning's FSDPStrategy(sharding_strategy='HYBRID_SHARD')."
)
_FIXED_CUTS = "reuses a saved partition. Name the first module of each stage but the first: split=['blocks.4']."
_ONLY_SHARDED = "has a meaning with sharded_data_parallel_degree only"
_TRAINERS = "is the Trainer's. Remove it here and write Trainer(precision={!r})."

# what has an option of ours is in `read`
KEYS: dict[str, Key] = {
    "ddp": Key(note="ranks that a pipeline leaves over are its replicas"),
    "ddp_port": Key(note="the port is MASTER_PORT's"),
    "optimize": Key(note="stages are cut for time, within memory_limit_gb"),
    "memory_weight": Key(note="stages are cut for time, within memory_limit_gb"),
    "auto_partition": Key(
        (True,),
        "cuts by hand. Name the first module of each stage but the first: split=['blocks.4'].",
        ("split",),
    ),
    "default_partition": Key(note="modules that split does not name belong to the stage before them"),
    "deterministic_server": Key(note="the order is the schedule's, always the same"),
    "offload_activations": Key(
        (False,), "has no equivalent. activation_checkpointing=True saves most of it.", ("activation_checkpointing",)
    ),
    "activation_loading_horizon": Key(note="has a meaning with offload_activations only"),
    "tensor_parallel_degree": Key(
        (1,),
        "cuts single layers, which nothing here does. Divide whole layers: pipeline_parallel_size=(that number times "
        "the pipeline_parallel_degree).",
        ("pipeline_parallel_size",),
    ),
    "prescaled_batch": Key(note="has a meaning with tensor parallelism only"),
    "sharded_data_parallel_degree": Key((1,), _SHARDED, ("pipeline_parallel_size",)),
    "sdp_reduce_bucket_size": Key(note=_ONLY_SHARDED),
    "sdp_param_persistence_threshold": Key(note=_ONLY_SHARDED),
    "sdp_max_live_parameters": Key(note=_ONLY_SHARDED),
    "sdp_hierarchical_allgather": Key(note=_ONLY_SHARDED),
    "sdp_gradient_clipping": Key(note=f"{_ONLY_SHARDED}; else write Trainer(gradient_clip_val=...)"),
    "fp16": Key((False,), _TRAINERS.format("16-mixed")),
    "fp16_params": Key((False,), _TRAINERS.format("16-true")),
    "bf16": Key((False,), _TRAINERS.format("bf16-mixed")),
    "skip_tracing": Key(note="one micro-batch is traced on the ranks themselves, for a few steps' time"),
    "load_partition": Key((False,), _FIXED_CUTS, ("split",)),
    "partition_file": Key((None, ""), _FIXED_CUTS, ("split",)),
    "contiguous": Key((True,), "is TensorFlow's. Remove it: stages are contiguous here."),
    "horovod": Key((False,), "is TensorFlow's. Remove it: the ranks left over are replicas."),
}
_READ = (
    "pipeline_parallel_degree", "partitions", "microbatches", "pipeline", "placement_strategy", "active_microbatches",
    "ddp_dist_backend", "shard_optimizer_state",
)  # fmt: skip
ALL_KEYS = (*_READ, *KEYS)
_PLACEMENTS = {
    "cluster": "cluster", "DPT": "cluster", "DTP": "cluster", "TDP": "cluster",
    "spread": "spread", "PDT": "spread", "PTD": "spread", "TPD": "spread",
}  # fmt: skip


def read(parameters: Mapping[str, Any], reading: Reading) -> str:
    """Turn the parameters into options, in ``reading``; returns the strategy's name.

    Every key's default is the library's own: ``microbatches`` is 1, which is no pipelining.
    """
    reading.look_up(KEYS, parameters)
    stages, parts = _stages(parameters, reading), reading.count(parameters, "microbatches", 1)
    schedule = reading.choice(
        parameters,
        "pipeline",
        "interleaved",
        {"interleaved": "1f1b", "simple": "gpipe"},
        "has to be 'simple' or 'interleaved'. To run forward only, call trainer.predict or trainer.validate.",
    )
    placement = reading.choice(
        parameters,
        "placement_strategy",
        "cluster",
        _PLACEMENTS,
        "has to be 'cluster', 'spread', or the letters D, P and T in some order, such as 'DPT'.",
    )
    active = reading.count(parameters, "active_microbatches")
    backend = reading.choice(
        parameters,
        "ddp_dist_backend",
        "auto",
        {"auto": "auto", "nccl": "nccl", "gloo": "gloo"},
        "has to be 'auto', 'nccl' or 'gloo'.",
    )
    if backend != "auto":
        reading.options["process_group_backend"] = backend
    shards = parameters.get("shard_optimizer_state", False)
    if shards not in (True, False):
        reading.refuse(f"shard_optimizer_state={shards!r}", "has to be True or False.")
    elif shards:
        reading.options["shard"] = "optimizer"
    if stages is None or parts is None or (stages == 1 and parts == 1):
        return "smddp"  # or more is wrong
    partition: dict[str, Any] = {"placement": placement}
    reading.options |= {"pipeline_parallel_size": stages, "num_microbatches": parts, "partition": partition}
    if 1 < parts < stages:  # 1f1b is for as many micro-batches as stages
        schedule = "gpipe"
    reading.options["schedule"] = schedule
    if active is not None:
        partition["active_microbatches"] = active
        reading.notes.append("active_microbatches: a round drains before the next one fills")
    return "smddp_pipeline"


def _stages(parameters: Mapping[str, Any], reading: Reading) -> int | None:
    """The number of stages, under its old or its new name; one of them is required."""
    names = [name for name in ("pipeline_parallel_degree", "partitions") if name in parameters]
    if not names and "pipeline_parallel_size" not in reading.given:
        reading.refuse("pipeline_parallel_degree", "is missing. Give the number of stages, or 1 for no pipeline.")
    counts = [reading.count(parameters, name) for name in names]
    if len(set(counts)) > 1:
        reading.refuse("partitions", f"is the old name of pipeline_parallel_degree, and differs: {counts}. Remove it.")
    stages: int | None = reading.given.get("pipeline_parallel_size", next(iter(counts), None))
    return stages
