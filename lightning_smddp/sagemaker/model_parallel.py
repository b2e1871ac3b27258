"""Parameters of SageMaker's model parallel library (SMP), versions 1 and 2, as options of ours.

Each version has a table of the keys without an equivalent here; one error lists all that is wrong in a configuration.
Version 1 is ``smdistributed.modelparallel`` up to 1.15. Source: SageMaker Python SDK 2, documentation of
``distribution["smdistributed"]["modelparallel"]["parameters"]``. Version 2 is ``torch.sagemaker``, also as SDK 3's
``SMP``: it shards parameters (FSDP) and has no pipelines. Source: AWS page ``distributed-model-parallel-v2-reference``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key without an option of ours of the same meaning.

    Attributes:
        neutral: values that ask for nothing we would have to do; None: every value.
        cure: what to do for any other value, as a sentence.
        cured_by: options of ours which, when they are given beside the configuration, answer the key.
        note: what is said when a value is given that is accepted, though it changes nothing.
    """

    neutral: tuple[Any, ...] | None = None
    cure: str = ""
    cured_by: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Reading:
    """What a configuration has come to so far.

    Attributes:
        given: options that the user gives beside the configuration.
        options: of the strategy.
        notes: what the user should know, in sentences.
        problems: what cannot be done, each with its cure.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def refuse(self, what: str, cure: str) -> None:
        """Keep ``what`` cannot be done, and its ``cure``, for the one error that :meth:`finish` raises."""
        self.problems.append(f"{what}: {cure}")

    def unknown(
        self,
        name: str,
        known: Iterable[str],
        elsewhere: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        """Note that ``name`` is none of the ``known`` keys, with what may have been meant."""
        for other, keys in (elsewhere or {}).items():
            if name in keys:
                self.refuse(name, f"is a key of {other}. Remove it.")
                return
        near = difflib.get_close_matches(name, list(known), n=2)
        if near:
            names = " or ".join(repr(other) for other in near)
            self.refuse(name, f"is unknown. Did you mean {names}?")
        else:
            names = ", ".join(sorted(known))
            self.refuse(name, f"is unknown. Known: {names}.")

    def look_up(self, table: Mapping[str, Key], values: Mapping[str, Any]) -> None:
        """Go through the keys of ``values`` that are in ``table``."""
        for name, value in values.items():
            key = table.get(name)
            if key is None:
                continue
            if key.neutral is None or _is_one_of(value, key.neutral):
                if key.note:
                    self.notes.append(f"{name}: {key.note}")
                continue
            is_cured = any(option in self.given for option in key.cured_by)
            if not is_cured:
                self.refuse(f"{name}={value!r}", key.cure)

    def count(self, values: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
        """The value of ``name``, which has to be a number from 1; the default if it is absent, or wrong."""
        value = values.get(name, default)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.refuse(f"{name}={value!r}", "has to be a number from 1.")
        return default

    def choice(
        self,
        values: Mapping[str, Any],
        name: str,
        default: str,
        choices: Mapping[str, str],
        cure: str,
    ) -> str:
        """What ``choices`` has for the value of ``name``; that of the default if it has nothing."""
        value = values.get(name, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(f"{name}={value!r}", cure)
            return choices[default]
        return choices[value]

    def finish(self, what: str) -> None:
        """Raise ``ValueError`` with everything that is wrong in ``what``, if anything is."""
        if self.problems:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            raise ValueError(f"{what} cannot be done as it is:{lines}")


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """As ``in``, but 1 is not True."""
    for other in allowed:
        same_kind = isinstance(value, bool) == isinstance(other, bool)
        if same_kind and value == other:
            return True
    return False


_FIXED_CUTS = "reuses a saved partition. Name the first module of each stage but the first: split=['blocks.4']."
_TUNES_SHARDING = "smddp_fsdp has no such option"
_TRAINERS = "is the Trainer's. Remove it here and write Trainer(precision={!r})."

# Keys without an option of ours of the same meaning. What has one is read in `_read_v1`.
KEYS_OF_V1: dict[str, Key] = {
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
    "sdp_reduce_bucket_size": Key(note=_TUNES_SHARDING),
    "sdp_param_persistence_threshold": Key(note=_TUNES_SHARDING),
    "sdp_max_live_parameters": Key(note=_TUNES_SHARDING),
    "sdp_hierarchical_allgather": Key(note=_TUNES_SHARDING),
    "sdp_gradient_clipping": Key(note="write Trainer(gradient_clip_val=...)"),
    "fp16": Key((False,), _TRAINERS.format("16-mixed")),
    "fp16_params": Key((False,), _TRAINERS.format("16-true")),
    "bf16": Key((False,), _TRAINERS.format("bf16-mixed")),
    "skip_tracing": Key(note="one micro-batch is traced on the ranks themselves, for a few steps' time"),
    "load_partition": Key((False,), _FIXED_CUTS, ("split",)),
    "partition_file": Key((None, ""), _FIXED_CUTS, ("split",)),
    "contiguous": Key((True,), "is TensorFlow's. Remove it: stages are contiguous here."),
    "horovod": Key((False,), "is TensorFlow's. Remove it: the ranks left over are replicas."),
}
_READ_OF_V1 = (
    "pipeline_parallel_degree", "partitions", "microbatches", "pipeline", "placement_strategy", "active_microbatches",
    "ddp_dist_backend", "shard_optimizer_state", "sharded_data_parallel_degree",
)  # fmt: skip
_ALL_OF_V1 = (*_READ_OF_V1, *KEYS_OF_V1)
_PLACEMENTS = {
    "cluster": "cluster", "DPT": "cluster", "DTP": "cluster", "TDP": "cluster",
    "spread": "spread", "PDT": "spread", "PTD": "spread", "TPD": "spread",
}  # fmt: skip


def _read_v1(parameters: Mapping[str, Any], reading: Reading) -> str:
    """Turn the parameters into options, in ``reading``; returns the strategy's name.

    Every key's default is the library's own: ``microbatches`` is 1, which is no pipelining.
    """
    # Every part is read, also behind one that is refused: the one error at the end has all that is wrong.
    reading.look_up(KEYS_OF_V1, parameters)
    stages = _stages(parameters, reading)
    parts = reading.count(parameters, "microbatches", 1)
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
    backends = {name: name for name in ("auto", "nccl", "gloo")}
    backend = reading.choice(parameters, "ddp_dist_backend", "auto", backends, "has to be 'auto', 'nccl' or 'gloo'.")
    if backend != "auto":
        reading.options["process_group_backend"] = backend
    sharded = _shard(parameters, "sharded_data_parallel_degree", reading)
    shards = parameters.get("shard_optimizer_state", False)
    if shards not in (True, False):
        reading.refuse(f"shard_optimizer_state={shards!r}", "has to be True or False.")
    elif shards and not sharded:  # else they are sharded anyway
        reading.options["shard"] = "optimizer"
    if stages is None or parts is None:  # missing; or wrong, and refused by now
        return "smddp"
    if sharded and stages > 1:
        reading.refuse(
            "sharded_data_parallel_degree and pipeline_parallel_degree",
            "cannot both be above 1. smddp_fsdp shards whole layers, and smddp_pipeline divides them: take one.",
        )
    if sharded:
        if parts > 1:
            reading.notes.append("microbatches: left out; smddp_fsdp runs a rank's batch as one")
        return "smddp_fsdp"
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
    if active is not None:
        reading.notes.append("active_microbatches: left out; 1f1b holds as many micro-batches as there are stages")
    return "smddp_pipeline"


def _stages(parameters: Mapping[str, Any], reading: Reading) -> int | None:
    """The number of stages, under its old or its new name; one of them is required."""
    # `pipeline_parallel_size` beside the configuration wins. What the configuration says is checked all the same.
    names = [name for name in ("pipeline_parallel_degree", "partitions") if name in parameters]
    if not names and "pipeline_parallel_size" not in reading.given:
        reading.refuse("pipeline_parallel_degree", "is missing. Give the number of stages, or 1 for no pipeline.")
    counts = [reading.count(parameters, name) for name in names]
    if len(set(counts)) > 1:
        reading.refuse("partitions", f"is the old name of pipeline_parallel_degree, and differs: {counts}. Remove it.")
    asked = counts[0] if counts else None
    stages: int | None = reading.given.get("pipeline_parallel_size", asked)
    return stages


_CUTS_LAYERS = "Divide whole layers over so many ranks: pipeline_parallel_size=(that number)."
_OFFLOADING = "has no equivalent; activation_checkpointing=True of smddp_pipeline saves most of it"

_DEGREE_OF_V2 = "hybrid_shard_degree"
KEYS_OF_V2: dict[str, Key] = {
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


def _read_v2(parameters: Mapping[str, Any], reading: Reading) -> str:
    """Turn the parameters into options, in ``reading``; returns the strategy's name."""
    reading.look_up(KEYS_OF_V2, parameters)
    if parameters.get(_DEGREE_OF_V2, 0) == 0:
        reading.notes.append(
            "hybrid_shard_degree: SMP leaves sharding to FSDP in the script; here every rank keeps all parameters: for "
            "sharding write Trainer(strategy='smddp_fsdp')"
        )
        return "smddp"
    return "smddp_fsdp" if _shard(parameters, _DEGREE_OF_V2, reading) else "smddp"


def _shard(parameters: Mapping[str, Any], name: str, reading: Reading) -> bool:
    """Whether parameters are sharded over the number of ranks under ``name``; ``smddp_fsdp``'s options for that."""
    degree = reading.count(parameters, name, 1)
    if degree == 1 or "pipeline_parallel_size" in reading.given:
        return False
    reading.options["sharding"] = "hybrid"
    reading.options["shard_size"] = degree
    return True


@dataclass(frozen=True)
class Version:
    """A version of the library.

    Attributes:
        name: as messages call it.
        keys: all that it knows.
        read: turns its parameters into options, in a :class:`Reading`; returns the strategy's name.
    """

    name: str
    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Reading], str]


V1 = Version("SMP v1", _ALL_OF_V1, _read_v1)
V2 = Version("SMP v2", (_DEGREE_OF_V2, *KEYS_OF_V2), _read_v2)
