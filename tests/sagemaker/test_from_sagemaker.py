"""Every configuration of SageMaker's SDKs and model parallel libraries becomes a strategy, or a list of cures."""

from __future__ import annotations

import json
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_smddp import PipelineStrategy, SMDDPFSDPStrategy, SMDDPStrategy, from_sagemaker
from lightning_smddp.pipeline.mesh import PipelineMesh
from lightning_smddp.sagemaker import translate
from lightning_smddp.sagemaker.distribution import distribution_of
from lightning_smddp.sagemaker.model_parallel import KEYS_OF_V1, KEYS_OF_V2, REFUSED_OF_V1, REFUSED_OF_V2
from tests.launchers.cases import FIXTURES, environ
from tests.strategies.grouped import grouped

ON = {"enabled": True}
V1_DEFAULTS: dict[str, Any] = {
    "pipeline_parallel_degree": 4, "microbatches": 8, "pipeline": "interleaved", "optimize": "memory",
    "placement_strategy": "cluster", "auto_partition": True, "default_partition": 0, "memory_weight": 0.8, "ddp": False,
    "ddp_port": 29500, "ddp_dist_backend": "auto", "active_microbatches": 6, "deterministic_server": False,
    "offload_activations": False, "activation_loading_horizon": 4, "tensor_parallel_degree": 1,
    "prescaled_batch": False, "shard_optimizer_state": False, "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 5e8, "sdp_param_persistence_threshold": 1e6, "sdp_max_live_parameters": 1e9,
    "sdp_hierarchical_allgather": True, "sdp_gradient_clipping": 1.0, "fp16": False, "fp16_params": False,
    "bf16": False, "skip_tracing": False, "load_partition": False, "partition_file": "", "contiguous": True,
    "horovod": False,
}  # fmt: skip
V2_DEFAULTS: dict[str, Any] = {
    "hybrid_shard_degree": 0, "tensor_parallel_degree": 1, "expert_parallel_degree": 1, "context_parallel_degree": 1,
    "sm_activation_offloading": True, "activation_loading_horizon": 2, "fsdp_cache_flush_warnings": False,
    "allow_empty_shards": False, "random_seed": 12345,
}  # fmt: skip


def v1(**parameters: Any) -> dict[str, Any]:
    return {
        "smdistributed": {"modelparallel": {**ON, "parameters": parameters}},
        "mpi": {**ON, "processes_per_host": 8, "custom_mpi_options": "--mca btl_vader 0"},
    }


def v2(**parameters: Any) -> dict[str, Any]:
    return {"torch_distributed": ON, "smdistributed": {"modelparallel": {**ON, "parameters": parameters}}}


# ---- SDK 2's dictionary, and SDK 3's ----

PIPELINE = "smddp_pipeline"
V1_PIPELINE = {"pipeline_parallel_size": 4, "num_microbatches": 8, "schedule": "1f1b"}
V1_PIPELINE |= {"partition": {"placement": "cluster"}}
TRANSLATED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({}, "smddp", {}),
    ({"smdistributed": {"dataparallel": {**ON, "custom_mpi_options": "-verbose"}}}, "smddp", {}),
    ({"torch_distributed": ON}, "smddp", {}),
    ({"mpi": {**ON, "processes_per_host": 8, "custom_mpi_options": ""}, "instance_groups": ["workers"]}, "smddp", {}),
    ({"parameter_server": ON}, "smddp", {"algorithm": "balanced"}),
    ({"smdistributed": {"modelparallel": {"enabled": False, "parameters": {"nonsense": 1}}}}, "smddp", {}),
    ({"pytorchxla": {"enabled": False}, "torch_distributed": ON}, "smddp", {}),
    (v2(**V2_DEFAULTS), "smddp", {}),
    (v1(partitions=1), "smddp", {}),
    (v1(**V1_DEFAULTS), PIPELINE, V1_PIPELINE),
    (v1(partitions=2), PIPELINE, {"num_microbatches": 1, "schedule": "1f1b"}),  # the library's default
    (v1(partitions=1, microbatches=4), PIPELINE, {"pipeline_parallel_size": 1, "num_microbatches": 4}),
    (v1(partitions=2, microbatches=4, pipeline="simple"), PIPELINE, {"schedule": "gpipe"}),
    (v1(partitions=4, microbatches=2), PIPELINE, {"schedule": "gpipe"}),  # too few for 1f1b
    (v1(partitions=2, shard_optimizer_state=True), PIPELINE, {"shard": "optimizer"}),
    (v1(partitions=2, offload_activations=True), PIPELINE, {"activation_checkpointing": "offload"}),
    (v1(partitions=1, offload_activations=True), "smddp", {}),
    # Of which version it is the keys tell, where the launcher does not.
    ({"smdistributed": {"modelparallel": {**ON, "parameters": {"hybrid_shard_degree": 1}}}}, "smddp", {}),
    ({"smdistributed": {"modelparallel": {**ON, "parameters": {"partitions": 2}}}}, PIPELINE, {}),
    ({"process_count_per_node": None, "smp": None}, "smddp", {}),
    ({"process_count_per_node": 8, "smp": {"hybrid_shard_degree": 1, "random_seed": None}}, "smddp", {}),
    ({"process_count_per_node": 8, "mpi_additional_options": ["-verbose"]}, "smddp", {}),
]


@pytest.mark.parametrize(("distribution", "strategy", "options"), TRANSLATED, ids=str)
def test_translations(distribution: dict[str, Any], strategy: str, options: dict[str, Any]) -> None:
    for form in (distribution, SimpleNamespace(model_dump=lambda: distribution)):
        found = translate(form)
        assert found.strategy == strategy
        assert options.items() <= found.options.items()
        assert strategy == PIPELINE or dict(found.options) == options
    made = from_sagemaker(distribution, **grouped(verbose=False))
    if strategy == "smddp":
        assert type(made) is SMDDPStrategy
        assert made._session.options.algorithm == options.get("algorithm", "auto")
        assert not made._session.options.communication.verbose
    else:
        made.options.grid(8)  # the schedule can do so many micro-batches


def test_sharding_has_no_micro_batches() -> None:
    found = translate(v1(partitions=1, sharded_data_parallel_degree=4, microbatches=4))
    assert (found.strategy, "microbatches" in found.options) == ("smddp_fsdp", False)


@pytest.mark.parametrize(
    "distribution",
    [
        v1(partitions=1, sharded_data_parallel_degree=4, shard_optimizer_state=True),
        v2(hybrid_shard_degree=4),
        {"process_count_per_node": 8, "smp": {"hybrid_shard_degree": 4, "random_seed": None}},
    ],
    ids=str,
)
def test_sharding_is_smddp_fsdp(distribution: dict[str, Any]) -> None:
    found = translate(distribution)
    assert (found.strategy, found.options) == ("smddp_fsdp", {"sharding": "hybrid", "shard_size": 4})
    strategy = from_sagemaker(distribution, meta_init=True)
    assert type(strategy) is SMDDPFSDPStrategy
    assert (strategy._sharding.shard_size, strategy._sharding.meta_init) == (4, True)
    assert translate(distribution, given={"pipeline_parallel_size": 2}).strategy == "smddp_pipeline"
    assert "shard_size" not in translate(distribution, given={"pipeline_parallel_size": 2}).options


def groups_of(letters: str, size: int, degrees: dict[str, int]) -> list[list[int]]:
    """Pipelines under SageMaker's rule: the rightmost letter varies fastest with the rank."""
    places = []
    for rank in range(size):
        rest, place = rank, {}
        for letter in reversed(letters):
            rest, place[letter] = divmod(rest, degrees[letter])
        places.append((place["D"], place["P"]))
    replicas = degrees["D"]
    return [[rank for rank in range(size) if places[rank][0] == replica] for replica in range(replicas)]


@pytest.mark.parametrize("letters", ["cluster", "spread", *map("".join, permutations("DPT"))])
def test_placements_are_sagemakers(letters: str) -> None:
    """With the facts' vectors of 8 ranks, but no tensor parallelism: DPT has neighbours in a pipeline."""
    order = {"cluster": "DPT", "spread": "TPD"}.get(letters, letters)
    placement = translate(v1(partitions=4, placement_strategy=letters)).options["partition"]["placement"]
    expected = groups_of(order, 8, {"D": 2, "P": 4, "T": 1})
    assert [sorted(pipeline) for pipeline in PipelineMesh.of(8, 4, placement).pipelines] == expected


# ---- keys without an equivalent ----


@pytest.mark.parametrize("name", REFUSED_OF_V1)
def test_every_refused_key_of_v1(name: str) -> None:
    check_key(v1, REFUSED_OF_V1[name], name, {"pipeline_parallel_degree": 2, name: V1_DEFAULTS[name]})


@pytest.mark.parametrize("name", REFUSED_OF_V2)
def test_every_refused_key_of_v2(name: str) -> None:
    check_key(v2, REFUSED_OF_V2[name], name, {name: V2_DEFAULTS[name]})


def check_key(make: Any, key: Any, name: str, parameters: dict[str, Any]) -> None:
    """The default is accepted; other values are refused with a cure."""
    default = parameters[name]
    assert translate(make(**parameters)).options == translate(make(**{**parameters, name: None})).options
    changed = {**parameters, name: not default if isinstance(default, bool) else "file" if default == "" else 3}
    with pytest.raises(ValueError, match=rf"cannot be done as it is:\n  - {name}=.*: \w.*\.$"):
        translate(make(**changed))
    if key.cured_by:
        value = {"split": ["b"], "pipeline_parallel_size": 6}[key.cured_by]
        assert key.cured_by in vars(from_sagemaker(make(**changed), **{key.cured_by: value}).options)


def test_the_tables_are_whole() -> None:
    assert KEYS_OF_V1 - {"partitions"} == set(V1_DEFAULTS)
    assert set(V2_DEFAULTS) == KEYS_OF_V2


def test_all_problems_are_named_at_once() -> None:
    distribution = v1(
        microbatch=4, fp16=True, tensor_parallel_degree=2, pipeline="_only_forward", hybrid_shard_degree=2,
        placement_strategy="DP", microbatches=0,
    ) | {"instance_group": ["a"], "mpi": {**ON, "process_per_host": 8}}  # fmt: skip
    with pytest.raises(ValueError, match="This SageMaker distribution cannot be done") as caught:
        translate(distribution)
    lines = str(caught.value).split("\n  - ")[1:]
    starts = [line.partition(" ")[0].rstrip(":") for line in lines]
    assert starts == [
        "mpi.process_per_host", "instance_group", "microbatch", "hybrid_shard_degree", "fp16=True",
        "tensor_parallel_degree=2", "pipeline_parallel_degree", "microbatches=0", "pipeline='_only_forward'",
        "placement_strategy='DP'",
    ]  # fmt: skip
    text = str(caught.value)
    assert (
        "mpi.process_per_host: is unknown. Known: mpi.custom_mpi_options, mpi.enabled, mpi.processes_per_host." in text
    )
    assert "Trainer(precision='16-mixed')" in text


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        ({"smdistributed": {"dataparallel": ON, "modelparallel": ON}, "mpi": ON}, "cannot both be on"),
        ({"pytorchxla": ON}, "pytorchxla: is for XLA devices"),
        ({"torch_distributed": True}, r"torch_distributed=True: has to be a dictionary"),
        ({"partitions": 2}, "partitions: is unknown"),
        (v1(partitions=2, pipeline_parallel_degree=4), "partitions: is the old name"),
        (v1(partitions=2, sharded_data_parallel_degree=2), "cannot both be above 1"),
        (v2(hybrid_shard_degree=-1), "hybrid_shard_degree=-1: has to be a number from 1"),
        ({"smdistributed": {"modelparallel": {**ON, "parameters": 3}}}, "3 cannot be read"),
        ("nonsense", "'nonsense' cannot be read. Give SageMaker's dictionary"),
    ],
    ids=str,
)
def test_refusals(distribution: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translate(distribution)


def test_options_beside_the_distribution_win() -> None:
    with pytest.raises(TypeError, match="SMDDPStrategy has no argument 'schedule'"):
        from_sagemaker({"torch_distributed": ON}, schedule="gpipe", split=["a"])
    strategy = from_sagemaker(v2(tensor_parallel_degree=4), pipeline_parallel_size=4, schedule="gpipe")
    assert type(strategy) is PipelineStrategy
    assert strategy.options.pipeline_parallel_size == 4
    spread = v1(microbatches=8, placement_strategy="spread")
    kept = from_sagemaker(spread, pipeline_parallel_size=2, partition={"memory_limit_gb": 3})
    assert kept.options.num_microbatches == 8
    assert (kept.options.partition.placement, kept.options.partition.memory_limit_gb) == ("spread", 3)


# ---- inside a job ----


@pytest.mark.parametrize(
    ("environment", "strategy", "options"),
    [
        ({"SM_FRAMEWORK_PARAMS": {}}, "smddp", {}),
        ({"SM_TRAINING_ENV": {"job_name": "a"}, "SM_DISTRIBUTED_CONFIG": {}}, "smddp", {}),
        ({"SM_FRAMEWORK_PARAMS": {"sagemaker_distributed_dataparallel_enabled": True}}, "smddp", {}),
        ({"SM_FRAMEWORK_PARAMS": {"sagemaker_parameter_server_enabled": True}}, "smddp", {"algorithm": "balanced"}),
        (
            {
                "SM_FRAMEWORK_PARAMS": {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 8},
                "SM_HP_MP_PARAMETERS": {"partitions": 2, "microbatches": 4, "ddp": True},
            },
            "smddp_pipeline",
            {"pipeline_parallel_size": 2, "num_microbatches": 4},
        ),
        ({"SM_DISTRIBUTED_CONFIG": {"process_count_per_node": 8, "smp": {"hybrid_shard_degree": 1}}}, "smddp", {}),
    ],
    ids=str,
)
def test_a_job_says_how_it_was_started(
    environment: dict[str, Any], strategy: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, json.dumps(value))
    found = translate()
    assert found.strategy == strategy
    assert options.items() <= found.options.items()


def test_sdk_3s_hyperparameter_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_DISTRIBUTED_CONFIG", '{"process_count_per_node": 8, "smp": null}')
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"tensor_parallel_degree": 2}')
    with pytest.raises(ValueError, match="tensor_parallel_degree=2"):
        translate()


def test_outside_of_a_job_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no SageMaker job .* Give the dictionary"):
        from_sagemaker()
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", "{")
    with pytest.raises(ValueError, match="SM_FRAMEWORK_PARAMS is not valid JSON"):
        from_sagemaker()


JOBS = {
    "sagemaker_mpi": {"mpi"}, "sagemaker_mpi_bare": {"mpi"}, "sagemaker_torch_distributed": {"torch_distributed"},
    "sagemaker_pytorchddp": {"pytorchddp"}, "sagemaker_parameter_server": {"parameter_server"},
    "sagemaker_smddp": set(), "sagemaker_none": set(), "sagemaker_local_mode": set(),
}  # fmt: skip


@pytest.mark.parametrize("case", JOBS)
def test_each_process_of_a_job_knows_that_it_is_one(case: str) -> None:
    """Also those that mpirun gave no variables of SageMaker's."""
    variables = {**environ(case), "SAGEMAKER_BASE_DIR": str(FIXTURES / case / "opt_ml")}
    assert distribution_of(variables).keys() == JOBS[case]
