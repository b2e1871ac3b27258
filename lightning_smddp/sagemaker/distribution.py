"""``from_sagemaker``: the strategy that does what a SageMaker ``distribution`` asks for.

Sources: SageMaker Python SDK 2.257 (``fw_utils.py``, ``estimator.py``) and 3.27 (``sagemaker.train.distributed``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning_smddp.launchers.launch import Environ
from lightning_smddp.launchers.sagemaker import hyperparameters, launched_by, parse_json, read_job
from lightning_smddp.sagemaker.model_parallel import KEYS_OF_V1, KEYS_OF_V2, Reading, read_v1, read_v2

_SIGNS = ("SM_FRAMEWORK_PARAMS", "SM_DISTRIBUTED_CONFIG", "SM_HP_MP_PARAMETERS")

# SDK 2's dictionary: the keys of each part; None where a key has a value.
_LAUNCHER = {"enabled": None}
_PLAIN: dict[str, Any] = {
    "smdistributed": {
        "dataparallel": {**_LAUNCHER, "custom_mpi_options": None},
        "modelparallel": {**_LAUNCHER, "parameters": None},
    },
    "mpi": {**_LAUNCHER, "processes_per_host": None, "custom_mpi_options": None},
    "torch_distributed": _LAUNCHER,
    "pytorchddp": {**_LAUNCHER, "custom_mpi_options": None},
    "parameter_server": _LAUNCHER,
    "pytorchxla": _LAUNCHER,
    "multi_worker_mirrored_strategy": _LAUNCHER,
    "instance_groups": None,
}
_MODERN = {"process_count_per_node": None, "smp": None, "mpi_additional_options": None}  # SDK 3's Torchrun and MPI


def is_job(environ: Environ) -> bool:
    """Whether this is a SageMaker training job, by its files or by its variables."""
    return any(environ.get(name) for name in _SIGNS) or read_job(environ) is not None


def distribution_of(environ: Environ) -> dict[str, Any]:
    """The ``distribution`` that the job was started with, as far as its environment tells.

    SDK 2's toolkit says it in SM_FRAMEWORK_PARAMS, SDK 3 in SM_DISTRIBUTED_CONFIG; model parallelism is in
    SM_HP_MP_PARAMETERS under both. Processes that mpirun gave no variables read the file of hyperparameters.

    Raises:
        ValueError: this is no SageMaker job, or a variable is not JSON.
    """
    if not is_job(environ):
        raise ValueError(
            "This is no SageMaker job (none of SM_FRAMEWORK_PARAMS, SM_DISTRIBUTED_CONFIG, SM_HP_MP_PARAMETERS is "
            "set), so there is nothing to read. Give the dictionary: from_sagemaker({'smdistributed': ...})."
        )
    # The toolkit makes the variable of the hyperparameter.
    text = environ.get("SM_HP_MP_PARAMETERS", hyperparameters(environ).get("mp_parameters"))
    # SDK 3's variable has its own fields, in which model parallelism may be missing; SDK 2 has a flag for each kind.
    model_parallel = parse_json(text or "{}", "SM_HP_MP_PARAMETERS")
    modern: dict[str, Any] = parse_json(environ.get("SM_DISTRIBUTED_CONFIG") or "{}", "SM_DISTRIBUTED_CONFIG")
    if modern:
        return {**modern, "smp": modern.get("smp") or model_parallel}
    found: dict[str, Any] = {name: {"enabled": True} for name in launched_by(environ)}
    found.pop("smdistributed dataparallel", None)  # which is what there is without anything else
    if model_parallel:
        found["smdistributed"] = {"modelparallel": {"enabled": True, "parameters": model_parallel}}
    return found


@dataclass(frozen=True)
class Translation:
    """What a ``distribution`` means here.

    Attributes:
        strategy: ``"smddp"``, ``"smddp_fsdp"`` or ``"smddp_pipeline"``.
        options: arguments of the strategy's class; those in a group as a dictionary.
    """

    strategy: str
    options: Mapping[str, Any]

    def create(self, **overrides: Any) -> Any:
        """The strategy object; ``overrides`` win over what was asked for."""
        from lightning_smddp import PipelineStrategy, SMDDPFSDPStrategy, SMDDPStrategy

        classes = {"smddp": SMDDPStrategy, "smddp_fsdp": SMDDPFSDPStrategy, "smddp_pipeline": PipelineStrategy}
        options = {**self.options, **overrides}
        given = overrides.get("partition")
        if isinstance(given, Mapping):
            options["partition"] = {**self.options.get("partition", {}), **given}
        return classes[self.strategy](**options)


def from_sagemaker(distribution: Any = None, **overrides: Any) -> Any:
    """The strategy for a SageMaker ``distribution``, to be given to ``Trainer(strategy=...)``.

    Args:
        distribution: SDK 2's dictionary; SDK 3's ``Torchrun`` or ``MPI`` object; None inside a job, which says in its
            environment how it was started.
        **overrides: options of the strategy, which win over the configuration, and settle keys that have no equivalent:
            ``split`` for cuts by hand, ``pipeline_parallel_size`` for tensor parallelism. A group that is given as a
            dictionary leaves the other options of the group as they are.

    Returns:
        ``SMDDPStrategy`` for data parallelism, ``SMDDPFSDPStrategy`` for sharding, ``PipelineStrategy`` for a pipeline;
        of ``lightning`` where ``pytorch_lightning`` is installed as well.

    Raises:
        ValueError: keys that are unknown or have no equivalent; the message lists all of them, each with a cure.
    """
    return translate(distribution, given=overrides).create(**overrides)


def translate(distribution: Any = None, given: Mapping[str, Any] = MappingProxyType({})) -> Translation:
    """As :func:`from_sagemaker`, without making the strategy: nothing heavy is imported.

    ``given`` are options that the user gives beside the configuration.
    """
    if distribution is None:
        asked = distribution_of(os.environ)
    else:
        asked = _as_dict(distribution)
    reading = Reading(given)
    if set(asked) & set(_MODERN):
        strategy = _read_modern(asked, reading)
    else:
        strategy = _read_plain(asked, reading)
    reading.finish()
    # By this option the user makes a pipeline of what has no other equivalent here.
    if "pipeline_parallel_size" in given:
        strategy = "smddp_pipeline"
    return Translation(strategy, reading.options)


def _as_dict(distribution: Any) -> dict[str, Any]:
    """A dictionary from one, or from a pydantic model of SDK 3."""
    if hasattr(distribution, "model_dump"):
        distribution = distribution.model_dump()
    if not isinstance(distribution, Mapping):
        raise ValueError(
            f"{distribution!r} cannot be read. Give SageMaker's dictionary, or the object of SDK 3 (Torchrun, MPI)."
        )
    return dict(distribution)


# ---- SDK 3 ----


def _read_modern(asked: Mapping[str, Any], reading: Reading) -> str:
    _look_for_unknown(asked, _MODERN, "", reading)
    smp = _as_dict(asked.get("smp") or {})
    parameters = {name: value for name, value in smp.items() if value is not None}
    return read_v2(parameters, reading)


# ---- SDK 2 ----


def _read_plain(asked: Mapping[str, Any], reading: Reading) -> str:
    """Which strategy SDK 2's dictionary means."""
    _look_for_unknown(asked, _PLAIN, "", reading)
    parts = dict(asked)
    libraries = parts.pop("smdistributed", None)
    if isinstance(libraries, Mapping):
        parts |= libraries
    on = {name for name, part in parts.items() if isinstance(part, Mapping) and part.get("enabled")}
    if "dataparallel" in on and "modelparallel" in on:
        reading.refuse(
            "dataparallel and modelparallel",
            "cannot both be on. smddp_pipeline does both: remove the first.",
        )
    if "pytorchxla" in on:
        reading.refuse(
            "pytorchxla",
            "is for XLA devices (Trainium). Use torch_distributed on GPU instances, or Lightning's XLA.",
        )
    if "modelparallel" in on:
        parameters = _as_dict(parts["modelparallel"].get("parameters") or {})
        return _reader(parameters, on)(parameters, reading)
    if "parameter_server" in on:
        reading.options["algorithm"] = "balanced"
    return "smddp"


def _look_for_unknown(asked: Mapping[str, Any], known: Mapping[str, Any], prefix: str, reading: Reading) -> None:
    """Note keys that are not ``known``, here and in the parts, and parts that are no dictionaries."""
    for name, value in asked.items():
        full_name = f"{prefix}{name}"
        if name not in known:
            reading.unknown(full_name, [f"{prefix}{other}" for other in known])
        elif known[name] is None:
            continue
        elif isinstance(value, Mapping):
            _look_for_unknown(value, known[name], f"{full_name}.", reading)
        else:
            reading.refuse(f"{full_name}={value!r}", "has to be a dictionary, such as {'enabled': True}.")


def _reader(parameters: Mapping[str, Any], on: Collection[str]) -> Callable[[Mapping[str, Any], Reading], str]:
    """Version 2 is started by torchrun, version 1 by mpirun; else the keys decide."""
    of_v2_alone = KEYS_OF_V2 - KEYS_OF_V1
    is_v2 = "torch_distributed" in on or ("mpi" not in on and not of_v2_alone.isdisjoint(parameters))
    return read_v2 if is_v2 else read_v1
