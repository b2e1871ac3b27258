"""Parameters of SageMaker's model parallel library (SMP), versions 1 and 2, as options of ours.

Each version has a table of the keys that are refused; one error lists all that is wrong in a configuration. Keys that
have no meaning here (``ddp``, memory weights, sizes of buffers) are passed over.
Version 1 is ``smdistributed.modelparallel`` up to 1.15. Source: SageMaker Python SDK 2, documentation of
``distribution["smdistributed"]["modelparallel"]["parameters"]``. Version 2 is ``torch.sagemaker``, also as SDK 3's
``SMP``: it shards parameters (FSDP) and has no pipelines. Source: AWS page ``distributed-model-parallel-v2-reference``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Refused:
    """A key that has no equivalent here.

    Attributes:
        default: the value that asks for nothing, as None does.
        cure: what to do for any other value, as a sentence.
        cured_by: an option of ours which, when it is given beside the configuration, answers the key.
    """

    default: Any
    cure: str
    cured_by: str = ""


@dataclass
class Reading:
    """What a configuration has come to so far.

    Attributes:
        given: options that the user gives beside the configuration.
        options: of the strategy.
        problems: what cannot be done, each with its cure.
    """

    given: Mapping[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def refuse(self, what: str, cure: str) -> None:
        """Keep ``what`` cannot be done, and its ``cure``, for the one error that :meth:`finish` raises."""
        self.problems.append(f"{what}: {cure}")

    def unknown(self, name: str, known: Iterable[str]) -> None:
        """Note that ``name`` is none of the ``known`` keys."""
        self.refuse(name, f"is unknown. Known: {', '.join(sorted(known))}.")

    def look_up(self, values: Mapping[str, Any], refused: Mapping[str, Refused], known: Collection[str]) -> None:
        """Refuse the keys of ``values`` that ask for something that is ``refused``, or are not ``known``."""
        for name in values:
            if name not in known:
                self.unknown(name, known)
        for name, key in refused.items():
            value = values.get(name)
            if value is not None and value != key.default and key.cured_by not in self.given:
                self.refuse(f"{name}={value!r}", key.cure)

    def count(self, values: Mapping[str, Any], name: str) -> int:
        """The value of ``name``, which has to be a number from 1; 1 if it is absent, or wrong."""
        value = values.get(name)
        if value is None:
            return 1
        if not isinstance(value, int) or value < 1:
            self.refuse(f"{name}={value!r}", "has to be a number from 1.")
            return 1
        return value

    def choice(self, values: Mapping[str, Any], name: str, choices: Mapping[str, str], cure: str) -> str:
        """What ``choices`` has for the value of ``name``, by default for the first one; empty where it has nothing."""
        value = values.get(name, next(iter(choices)))
        if str(value) not in choices:
            self.refuse(f"{name}={value!r}", cure)
        return choices.get(str(value), "")

    def finish(self) -> None:
        """Raise ``ValueError`` with everything that is wrong, if anything is."""
        if self.problems:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            raise ValueError(f"This SageMaker distribution cannot be done as it is:{lines}")


_BY_HAND = "Name the first module of each stage but the first: split=['blocks.4']."
_LAYERS = "Divide whole layers over ranks: pipeline_parallel_size=(that number)."

# Keys without an option of ours of the same meaning. What has one is read in `read_v1`.
REFUSED_OF_V1 = {
    "auto_partition": Refused(True, f"cuts by hand. {_BY_HAND}", "split"),
    "load_partition": Refused(False, f"reuses a saved partition. {_BY_HAND}", "split"),
    "partition_file": Refused("", f"reuses a saved partition. {_BY_HAND}", "split"),
    "fp16": Refused(False, "is the Trainer's. Remove it here and write Trainer(precision='16-mixed')."),
    "fp16_params": Refused(False, "is the Trainer's. Remove it here and write Trainer(precision='16-true')."),
    "bf16": Refused(False, "is the Trainer's. Remove it here and write Trainer(precision='bf16-mixed')."),
    "tensor_parallel_degree": Refused(
        1,
        "cuts single layers. Divide whole layers over ranks: pipeline_parallel_size=(that number times the "
        "pipeline_parallel_degree).",
        "pipeline_parallel_size",
    ),
    "sdp_gradient_clipping": Refused(1.0, "is the Trainer's. Remove it here and write Trainer(gradient_clip_val=...)."),
}
PASSED_OF_V1 = (
    "ddp", "ddp_port", "ddp_dist_backend", "optimize", "memory_weight", "default_partition", "active_microbatches",
    "deterministic_server", "activation_loading_horizon", "prescaled_batch", "sdp_reduce_bucket_size",
    "sdp_param_persistence_threshold", "sdp_max_live_parameters", "sdp_hierarchical_allgather", "skip_tracing",
    "contiguous", "horovod",
)  # fmt: skip
_READ_OF_V1 = (
    "pipeline_parallel_degree", "partitions", "microbatches", "pipeline", "placement_strategy",
    "shard_optimizer_state", "sharded_data_parallel_degree", "offload_activations",
)  # fmt: skip
_PLACEMENTS = {
    "cluster": "cluster", "DPT": "cluster", "DTP": "cluster", "TDP": "cluster",
    "spread": "spread", "PDT": "spread", "PTD": "spread", "TPD": "spread",
}  # fmt: skip


KEYS_OF_V1 = {*_READ_OF_V1, *REFUSED_OF_V1, *PASSED_OF_V1}


def read_v1(parameters: Mapping[str, Any], reading: Reading) -> str:
    """Turn the parameters into options, in ``reading``; returns the strategy's name.

    Every key's default is the library's own: ``microbatches`` is 1, which is no pipelining.
    """
    # Every part is read, also behind one that is refused: the one error at the end has all that is wrong.
    reading.look_up(parameters, REFUSED_OF_V1, KEYS_OF_V1)
    if {"partitions", "pipeline_parallel_degree"} <= parameters.keys():
        reading.refuse("partitions", "is the old name of pipeline_parallel_degree. Remove one of them.")
    stages = _stages(parameters, reading)
    parts = reading.count(parameters, "microbatches")
    schedule = reading.choice(
        parameters,
        "pipeline",
        {"interleaved": "1f1b", "simple": "gpipe"},
        "has to be 'simple' or 'interleaved'. To run forward only, call trainer.predict or trainer.validate.",
    )
    placement = reading.choice(
        parameters,
        "placement_strategy",
        _PLACEMENTS,
        "has to be 'cluster', 'spread', or the letters D, P and T in some order, such as 'DPT'.",
    )
    sharded = _shard(parameters, "sharded_data_parallel_degree", reading)
    if parameters.get("shard_optimizer_state") and not sharded:  # else it is sharded anyway
        reading.options["shard"] = "optimizer"
    if parameters.get("offload_activations") and (sharded or (stages, parts) != (1, 1)):  # else SMP offloads nothing
        reading.options["activation_checkpointing"] = "offload"
    if stages is None:  # as given: of all ranks
        return "smddp_pipeline"
    if sharded and stages > 1:
        reading.refuse(
            "sharded_data_parallel_degree and pipeline_parallel_degree",
            "cannot both be above 1. smddp_fsdp shards whole layers, and smddp_pipeline divides them: take one.",
        )
    if sharded:
        return "smddp_fsdp"  # which runs a rank's batch as one
    if stages == 1 and parts == 1:
        return "smddp"
    if 1 < parts < stages:  # 1f1b is for as many micro-batches as stages
        schedule = "gpipe"
    reading.options |= {
        "pipeline_parallel_size": stages,
        "num_microbatches": parts,
        "partition": {"placement": placement},
        "schedule": schedule,
    }
    return "smddp_pipeline"


def _stages(parameters: Mapping[str, Any], reading: Reading) -> int | None:
    """The number of stages, under its new or its old name; one of them is required."""
    # `pipeline_parallel_size` beside the configuration wins. What the configuration says is checked all the same.
    name = "partitions" if "partitions" in parameters else "pipeline_parallel_degree"
    asked = reading.count(parameters, name)
    if name not in parameters and "pipeline_parallel_size" not in reading.given:
        reading.refuse(name, "is missing. Give the number of stages, or 1 for no pipeline.")
    stages: int | None = reading.given.get("pipeline_parallel_size", asked)
    return stages


_DEGREE_OF_V2 = "hybrid_shard_degree"
REFUSED_OF_V2 = {
    "tensor_parallel_degree": Refused(1, f"cuts single layers. {_LAYERS}", "pipeline_parallel_size"),
    "expert_parallel_degree": Refused(1, f"spreads experts. {_LAYERS}", "pipeline_parallel_size"),
    "context_parallel_degree": Refused(1, f"cuts the sequence. {_LAYERS}", "pipeline_parallel_size"),
}
PASSED_OF_V2 = (
    "sm_activation_offloading", "activation_loading_horizon", "fsdp_cache_flush_warnings", "allow_empty_shards",
    "random_seed",
)  # fmt: skip


KEYS_OF_V2 = {_DEGREE_OF_V2, *REFUSED_OF_V2, *PASSED_OF_V2}


def read_v2(parameters: Mapping[str, Any], reading: Reading) -> str:
    """Turn the parameters into options, in ``reading``; returns the strategy's name."""
    reading.look_up(parameters, REFUSED_OF_V2, KEYS_OF_V2)
    # With 0 the script's own FSDP decides: here every rank keeps all parameters.
    sharded = parameters.get(_DEGREE_OF_V2) != 0 and _shard(parameters, _DEGREE_OF_V2, reading)
    return "smddp_fsdp" if sharded else "smddp"


def _shard(parameters: Mapping[str, Any], name: str, reading: Reading) -> bool:
    """Whether parameters are sharded over the number of ranks under ``name``; ``smddp_fsdp``'s options for that."""
    degree = reading.count(parameters, name)
    if degree == 1 or "pipeline_parallel_size" in reading.given:
        return False
    reading.options["sharding"] = "hybrid"
    reading.options["shard_size"] = degree
    return True
