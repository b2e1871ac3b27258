"""``from_sagemaker``: the strategy that does what a SageMaker ``distribution`` asks for.

Sources: SageMaker Python SDK 2.257 (``fw_utils.py``, ``estimator.py``) and 3.27 (``sagemaker.train.distributed``).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_smddp.launchers.sagemaker import FLAGS, hyperparameters, is_on, parameters_of, read_job
from lightning_smddp.sagemaker.model_parallel import V1, V2, Reading, Version

_SIGNS = ("SM_FRAMEWORK_PARAMS", "SM_DISTRIBUTED_CONFIG", "SM_HP_MP_PARAMETERS", "SM_TRAINING_ENV", "SM_CURRENT_HOST")

log = logging.getLogger(__name__)

_LAUNCHER = {"enabled"}
_PARTS: dict[str, set[str]] = {
    "smdistributed": {"dataparallel", "modelparallel"},
    "mpi": _LAUNCHER | {"processes_per_host", "custom_mpi_options"},
    "torch_distributed": _LAUNCHER,
    "pytorchddp": _LAUNCHER | {"custom_mpi_options"},
    "parameter_server": _LAUNCHER,
    "pytorchxla": _LAUNCHER,
    "multi_worker_mirrored_strategy": _LAUNCHER,
}
_SMDISTRIBUTED = {
    "dataparallel": _LAUNCHER | {"custom_mpi_options"},
    "modelparallel": _LAUNCHER | {"parameters"},
}
_MODERN = {"process_count_per_node", "smp", "mpi_additional_options"}  # SDK 3's Torchrun and MPI
_PLAIN = {*_PARTS, "instance_groups"}


def is_job(environ: Mapping[str, str]) -> bool:
    """Whether this is a SageMaker training job, by its files or by its variables."""
    return any(environ.get(name) for name in _SIGNS) or read_job(environ) is not None


def distribution_of(environ: Mapping[str, str]) -> dict[str, Any]:
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
    model_parallel = _json({**_from_file(environ), **environ}, "SM_HP_MP_PARAMETERS")
    modern = _json(environ, "SM_DISTRIBUTED_CONFIG")
    if modern:
        if model_parallel and not modern.get("smp"):
            modern["smp"] = model_parallel
        return modern
    flags = parameters_of(environ)
    found: dict[str, Any] = {name: {"enabled": True} for flag, name in FLAGS.items() if is_on(flags.get(flag))}
    smdistributed: dict[str, Any] = {}
    if found.pop("smdistributed dataparallel", None) is not None:
        smdistributed["dataparallel"] = {"enabled": True}
    if model_parallel:
        smdistributed["modelparallel"] = {"enabled": True, "parameters": model_parallel}
    if smdistributed:
        found["smdistributed"] = smdistributed
    return found


def _from_file(environ: Mapping[str, str]) -> dict[str, str]:
    """``SM_HP_MP_PARAMETERS`` as the toolkit makes it."""
    text = hyperparameters(environ).get("mp_parameters")
    if text is None:
        return {}
    return {"SM_HP_MP_PARAMETERS": text}


def _json(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    """A variable's JSON object; empty if it is not set."""
    text = environ.get(name) or "{}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} is not JSON ({error}). SageMaker sets it: do not change it.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name}={text!r} has to be a JSON object. SageMaker sets it: do not change it.")
    return value


@dataclass(frozen=True)
class Translation:
    """What a ``distribution`` means here.

    Attributes:
        strategy: ``"smddp"`` or ``"smddp_pipeline"``.
        options: arguments of the strategy's class; those in a group as a dictionary.
        notes: what else the configuration says, and what becomes of it, in sentences.
    """

    strategy: str
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def create(self, **overrides: Any) -> Any:
        """The strategy object: an ``SMDDPStrategy`` or a ``PipelineStrategy``.

        Raises:
            ValueError: an option of pipelines is given, but there is no pipeline.
        """
        from lightning_smddp import PartitionOptions, PipelineStrategy, SMDDPStrategy

        if self.strategy == "smddp_pipeline":
            options = {**self.options, **overrides}
            if "partition" in self.options and "partition" in overrides:
                options["partition"] = _completed(overrides["partition"], self.options["partition"])
            return PipelineStrategy(**options)
        pipelines = set(signature(PipelineStrategy).parameters) - set(signature(SMDDPStrategy).parameters)
        pipelines |= {field.name for field in fields(PartitionOptions)}
        misplaced = sorted(pipelines & set(overrides) - set(signature(_ddp_strategy(SMDDPStrategy)).parameters))
        if misplaced:
            raise ValueError(
                f"{', '.join(misplaced)}: an option of smddp_pipeline, but this distribution is data parallelism. Give "
                "pipeline_parallel_size as well, or leave it out."
            )
        return SMDDPStrategy(**{**self.options, **overrides})


def _completed(given: Any, asked: Mapping[str, Any]) -> Any:
    """A group of options as the user gives it, a dictionary or a dataclass; what it leaves open is as ``asked``."""
    if isinstance(given, Mapping):
        return {**asked, **given}
    if not is_dataclass(given):
        return given  # which the strategy refuses
    defaults = {field.name: field.default for field in fields(given)}
    open_ones = {name: value for name, value in asked.items() if getattr(given, name) == defaults[name]}
    return replace(given, **open_ones)  # type: ignore[type-var]


def _ddp_strategy(strategy: type[Any]) -> Any:
    """Lightning's class, whose arguments ``strategy`` takes as well."""
    return next(cls for cls in strategy.__mro__ if not cls.__module__.startswith("lightning_smddp"))


def from_sagemaker(distribution: Any = None, **overrides: Any) -> Any:
    """The strategy for a SageMaker ``distribution``, to be given to ``Trainer(strategy=...)``.

    Args:
        distribution: SDK 2's dictionary; SDK 3's ``Torchrun`` or ``MPI`` object, or its JSON; None inside a job, which
            says in its environment how it was started.
        **overrides: options of the strategy, which win over the configuration, and settle keys that have no equivalent:
            ``split`` for cuts by hand, ``pipeline_parallel_size`` for sharding. What a group leaves at its default is
            as in the configuration.

    Returns:
        ``SMDDPStrategy`` for data parallelism, ``PipelineStrategy`` for a pipeline; of ``lightning`` where
        ``pytorch_lightning`` is installed as well (for that use :func:`translate`, and its classes).

    Raises:
        ValueError: keys that are unknown or have no equivalent; the message lists all of them, each with a cure.
    """
    found = translate(distribution, given=overrides)
    for note in found.notes:
        log.info("SageMaker's %s", note)
    return found.create(**overrides)


def translate(distribution: Any = None, given: Mapping[str, Any] = MappingProxyType({})) -> Translation:
    """As :func:`from_sagemaker`, without making the strategy: nothing heavy is imported.

    ``given`` are options that the user gives beside the configuration.
    """
    if distribution is None:
        asked = distribution_of(os.environ)
    else:
        asked = _as_dict(distribution)
    reading = Reading(given)
    if set(asked) & _MODERN:
        strategy = _read_modern(asked, reading)
    else:
        strategy = _read_plain(asked, reading)
    reading.finish("This SageMaker distribution")
    if "pipeline_parallel_size" in given:
        strategy = "smddp_pipeline"
    return Translation(strategy, reading.options, tuple(reading.notes))


def _as_dict(distribution: Any) -> dict[str, Any]:
    """A dictionary from one, from a pydantic model of SDK 3, or from JSON."""
    if isinstance(distribution, str):
        try:
            distribution = json.loads(distribution)
        except ValueError as error:
            raise ValueError(
                f"distribution={distribution!r} is not JSON: {error}. Give SageMaker's dictionary, its JSON, or the "
                "object of SDK 3."
            ) from None
    dump = getattr(distribution, "model_dump", None)
    value = distribution
    if callable(dump):
        value = dump()
    if not isinstance(value, Mapping):
        raise ValueError(
            f"distribution={distribution!r} is a {type(distribution).__name__}. Give SageMaker's dictionary, its JSON, "
            "or the object of SDK 3 (Torchrun, MPI)."
        )
    return dict(value)


# ---- SDK 3 ----


def _read_modern(asked: Mapping[str, Any], reading: Reading) -> str:
    for name in asked:
        if name not in _MODERN:
            reading.unknown(name, _MODERN)
    _count_processes("process_count_per_node", asked.get("process_count_per_node"), reading)
    smp = asked.get("smp")
    if smp is None:
        return "smddp"
    parameters = {name: value for name, value in _as_dict(smp).items() if value is not None}
    return _read_smp(parameters, V2, reading)


# ---- SDK 2 ----


def _read_plain(asked: Mapping[str, Any], reading: Reading) -> str:
    """Which strategy SDK 2's dictionary means."""
    on = {name for name, part in _parts(asked, reading) if part.get("enabled", False)}
    if {"dataparallel", "modelparallel"} <= on:
        reading.refuse(
            "dataparallel and modelparallel", "cannot both be on. smddp_pipeline does both: remove the first."
        )
    if "pytorchxla" in on:
        reading.refuse(
            "pytorchxla", "is for XLA devices (Trainium). Use torch_distributed on GPU instances, or Lightning's XLA."
        )
    if "modelparallel" in on:
        parameters = _parameters(asked["smdistributed"]["modelparallel"].get("parameters") or {}, reading)
        return _read_smp(parameters, _version(parameters, on), reading)
    if "parameter_server" in on:
        reading.options["algorithm"] = "balanced"
        reading.notes.append("parameter_server: every node sums an equal share for all others, in step; none lags")
    return "smddp"


def _parts(asked: Mapping[str, Any], reading: Reading) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every part that can be on, by name; unknown keys on the way are noted."""
    for name, part in asked.items():
        if name not in _PLAIN:
            reading.unknown(name, _PLAIN, {V1.name: V1.keys, V2.name: V2.keys})
        elif name == "instance_groups":
            continue
        elif not isinstance(part, Mapping):
            reading.refuse(f"{name}={part!r}", "has to be a dictionary, such as {'enabled': True}.")
        else:
            for key in part:
                if key not in _PARTS[name]:
                    reading.unknown(f"{name}.{key}", [f"{name}.{known}" for known in _PARTS[name]])
            if name == "smdistributed":
                yield from _smdistributed(part, reading)
            else:
                _count_processes("processes_per_host", part.get("processes_per_host"), reading)
                yield name, part


def _smdistributed(part: Mapping[str, Any], reading: Reading) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, known in _SMDISTRIBUTED.items():
        inner = part.get(name, {})
        if not isinstance(inner, Mapping):
            reading.refuse(f"{name}={inner!r}", "has to be a dictionary, such as {'enabled': True}.")
            continue
        for key in inner:
            if key not in known:
                reading.unknown(f"{name}.{key}", [f"{name}.{other}" for other in known])
        yield name, inner


def _parameters(given: Any, reading: Reading) -> dict[str, Any]:
    """Model parallel parameters; SDK 2 also takes the path of a JSON file."""
    if isinstance(given, (str, os.PathLike)):
        try:
            given = json.loads(Path(given).read_text())
        except (OSError, ValueError) as error:
            reading.refuse(f"parameters={str(given)!r}", f"is no JSON file that can be read ({error}).")
            return {"pipeline_parallel_degree": 1}
    if not isinstance(given, Mapping):
        reading.refuse(f"parameters={given!r}", "has to be a dictionary, or the path of a JSON file.")
        return {"pipeline_parallel_degree": 1}
    return dict(given)


def _version(parameters: Mapping[str, Any], on: Collection[str]) -> Version:
    """Version 2 is started by torchrun, version 1 by mpirun; else the keys decide."""
    if "torch_distributed" in on:
        return V2
    if "mpi" in on:
        return V1
    new = set(V2.keys) - set(V1.keys)
    if new & set(parameters):
        return V2
    return V1


def _read_smp(parameters: Mapping[str, Any], version: Version, reading: Reading) -> str:
    other = V1
    if version is V1:
        other = V2
    for name in parameters:
        if name not in version.keys:
            reading.unknown(name, version.keys, {other.name: other.keys})
    return version.read(parameters, reading)


def _count_processes(name: str, count: Any, reading: Reading) -> None:
    if count is not None:
        reading.notes.append(f"{name}: is the launcher's; the Trainer's devices has to be {count}, or 'auto'")
